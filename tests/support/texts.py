"""A model and its greedy texts: engines on it must give these, whatever drafts, and though rows begin again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from emssd_ragged import RaggedConfig
from emssd_testing.drafters import RandomDrafter, TreeDrafter
from emssd_testing.models import WideFloats
from emssd_testing.oracle import greedy_reference
from transformers import PreTrainedModel

from emssd import Engine
from emssd.decoding.scheduler import ContinuousScheduler
from tests.support.trees import DecoyDrafter

VOCAB_SIZE, NEW_TOKENS = 13, 12
PROMPTS = ((3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 3, 3, 9), (8,), (9, 3, 11, 4, 9, 3, 12, 5, 9), (10, 6, 6, 7, 10, 6))


class Texts:
    """Texts of the forward pass of a model with a vocabulary of `VOCAB_SIZE`.

    Args:
        options: of all engines.

    Attributes:
        known: by prompt, one token more than engines generate.
    """

    def __init__(self, model: PreTrainedModel, prompts: Iterable[tuple[int, ...]] = PROMPTS, **options: Any) -> None:
        common = {"batch_size": 3, "budget": "fixed", "max_model_len": 64, "on_drafter_error": "fail"}
        self.model, self._options = model, common | options
        with WideFloats():
            self.known = {prompt: [*greedy_reference(model, prompt, NEW_TOKENS + 1)] for prompt in prompts}

    def engine(self, drafter: Any, **options: Any) -> Engine:
        with WideFloats():
            return Engine.from_model(self.model, drafter=drafter, **self._options | options)

    def decoded(self, engine: Engine) -> Engine:
        """The same engine, which has given the texts."""
        with WideFloats():
            done = engine.generate([*self.known], NEW_TOKENS, ignore_eos=True)
        assert [list(row.token_ids) for row in done] == [text[:NEW_TOKENS] for text in self.known.values()]
        return engine

    def try_every_draft(self) -> None:
        """Chains, and trees whose right nodes move; in pieces, and padded."""
        pieces = {"backend": "ragged", "max_step_tokens": 9}
        for drafter, options in (
            (RandomDrafter(VOCAB_SIZE, 5, self.known, seed=1), pieces),
            (DecoyDrafter(VOCAB_SIZE, self.known), pieces),
            (TreeDrafter(VOCAB_SIZE, 8, self.known, seed=2), {"backend": "padded"}),
        ):
            engine = self.decoded(self.engine(drafter, **options))
            assert engine.report.num_accepted > NEW_TOKENS
            assert engine.report.kv_usage.held == 0

    def try_preemption(self, kv_memory: str) -> None:
        """Rows that lose what they keep begin again."""
        drafter = DecoyDrafter(VOCAB_SIZE, self.known, depth=1)
        engine = self.engine(drafter, kv_memory=kv_memory, backend=RaggedConfig(page_size=4))
        engine.scheduler = ContinuousScheduler(3, headroom=0)
        assert self.decoded(engine).report.num_preempted > 0
