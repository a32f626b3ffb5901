"""`proposer`: emssd's drafters inside vLLM, as a class for ``speculative_config={"method": "custom_class", …}``.

vLLM imports the class by its name, ``"emssd.integrations.vllm.suffix"`` say, and makes one object of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.integrations.installed import check_installed
from emssd.sequences import Batch, FinishReason, Request, Row

__all__ = ["Proposer", "proposer"]


def proposer(name: str, /, **options: Any) -> type[Proposer]:
    """A class that drafts inside vLLM with drafter `name`, of emssd or of an installed plugin.

    A module of one's own gives it a name that vLLM can import: ``Mine = proposer("suffix", num_speculative_tokens=8)``.
    With default options every drafter has one here: ``emssd.integrations.vllm.suffix``. Raises ConfigError: there is no
    vLLM, or another version than this was written for; the drafter has no such option; or PluginError: there is no such
    drafter, or it cannot run here.
    """
    check_installed("vllm")
    Registry().configured("drafter", name, options)
    return type(name, (Proposer,), {"__module__": __name__, "drafter": name, "options": options})


@dataclass(slots=True)
class _Row:
    """A row that vLLM asked for, and its text as vLLM had it."""

    sequence: Row
    text: np.ndarray


class Proposer:
    """Drafts for vLLM after every step; see `proposer`.

    vLLM does not say which request a row is, so it is recognised by its text: it goes on from what it was a step ago.
    The drafter gets rows as it does from an engine: it proposes, observes what was accepted of that, and drops rows
    that are no longer there. Three things vLLM does not tell. Why a row is gone: all count as ended, also one that was
    preempted, and may have a few tokens after its EOS. The target's tokens after a rejected one: -1 stands in
    `Outcome.target_ids`. How long a row may become: a draft may reach beyond its ``max_tokens``.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Attributes:
        drafter, options: set by `proposer`.

    Raises:
        ConfigError: the drafter needs what vLLM does not give: a model, hidden states, candidates, or room for trees.
        PluginError: it cannot be built.
    """

    drafter: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self._num_drafted: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = model.max_model_len
        self._stages = _stages(self.drafter, self.options, model.get_vocab_size())
        self._known: list[_Row | None] = []  # of the latest step, in its order; None for rows that were not asked for
        self._drafted_for: list[Row] = []
        self._draft = Draft.empty(0)
        self._num_rows = 0

    def load_model(self, *arguments: Any) -> None:
        """There is none; vLLM's CPU build calls it in any case."""

    def propose(
        self,
        sampled_token_ids: Seq[Seq[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the step that follows.

        Args:
            sampled_token_ids: of each row the tokens that the step gave, accepted ones and the target's own; none for
                a row whose prompt is not yet computed.
            num_tokens_no_spec: ``[≥ B]`` the length of each row, these tokens included.
            token_ids_cpu: ``[≥ B, max_model_len]`` the rows themselves.

        Returns:
            For each row a chain of at most ``num_speculative_tokens`` tokens.
        """
        texts = [
            token_ids_cpu[row, : num_tokens_no_spec[row]].copy() if sampled else None
            for row, sampled in enumerate(sampled_token_ids)
        ]
        before = [
            None if text is None else text[: len(text) - len(sampled)]
            for text, sampled in zip(texts, sampled_token_ids, strict=True)
        ]
        recognised = _recognised(before, self._known)
        self._conclude({row.sequence.request_id: sampled_token_ids[index] for index, row in recognised.items()})
        self._known = [
            None
            if text is None
            else _Row(recognised[index].sequence if index in recognised else self._begun(text, new), text)
            for index, (text, new) in enumerate(zip(texts, sampled_token_ids, strict=True))
        ]
        return self._drafted()

    def _begun(self, text: np.ndarray, new: Seq[int]) -> Row:
        """A row that was not there before, with its `new` tokens at the end of `text`."""
        self._num_rows += 1
        prompt = tuple(text[: len(text) - len(new)].tolist())
        row = Row(Request(str(self._num_rows), prompt, self._max_length), max_length=self._max_length)
        row.advance(row.taken(new)[0], None, num_drafted=0, num_accepted=0)
        return row

    def _conclude(self, new: Mapping[str, Seq[int]]) -> None:
        """Tell the drafter of the step after its latest draft: `new` tokens of each row that is still there, by id."""
        accepted, targets, verified = list[range](), list[list[int]](), list[int]()
        rows = list[Row]()
        for index, row in enumerate(self._drafted_for):
            start, stop = self._draft.indptr[index : index + 2]
            tokens, chain, right = new.get(row.request_id), list[int](), 0
            if tokens is None:  # its draft came too late
                row, tokens = replace(row, finish_reason=FinishReason.STOP), [-1]
            else:
                chain = self._draft.token_ids[start:stop].tolist()
                pairs = zip(chain, tokens[:-1], strict=False)
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                row.advance(row.taken(tokens)[0], None, num_drafted=len(chain), num_accepted=right)
            rows.append(row)
            verified.append(len(chain))
            accepted.append(range(right))
            targets.append([*tokens[: right + 1], *[-1] * (len(chain) - right)])
        if rows:
            self._stages.stats = tuple(
                stage._replace(drafted=tuple(map(min, stage.drafted, verified))) for stage in self._stages.stats
            )
            outcome = Outcome(Batch(tuple(rows)), self._draft.cut(verified), tuple(accepted), tuple(targets))
            self._stages.observe(outcome)
        if gone := [row.sequence.request_id for row in self._known if row and row.sequence.request_id not in new]:
            self._stages.release(gone)

    def _drafted(self) -> list[list[int]]:
        """A chain for each row, none for those that cannot grow."""
        places = [index for index, row in enumerate(self._known) if row and row.sequence.num_remaining > 0]
        self._drafted_for = [row.sequence for row in map(self._known.__getitem__, places) if row]
        chains: list[list[int]] = [[] for _ in self._known]
        self._draft = Draft.empty(0)
        if places:
            limits = [min(self._num_drafted, row.num_remaining - 1) for row in self._drafted_for]
            self._draft = self._stages.propose(Batch(tuple(self._drafted_for)), limits, 0)
            token_ids = self._draft.token_ids.tolist()
            for index, start, stop in zip(places, self._draft.indptr, self._draft.indptr[1:], strict=False):
                chains[index] = token_ids[start:stop]
        return chains


def _recognised(before: Seq[np.ndarray | None], rows: Seq[_Row | None]) -> dict[int, _Row]:
    """The row with each text of `before`, by index in `before`; among equal rows the one at that index."""
    free = {index: row for index, row in enumerate(rows) if row is not None}
    recognised = dict[int, _Row]()
    for anywhere in (False, True):
        for index, text in enumerate(before):
            if text is not None and index not in recognised:
                candidates = list(free) if anywhere else free.keys() & {index}
                same = (other for other in candidates if np.array_equal(text, free[other].text))
                if (other := next(same, None)) is not None:
                    recognised[index] = free.pop(other)
    return recognised


def _stages(name: str, options: Mapping[str, Any], vocab_size: int) -> DraftStages:
    """The drafter, with the checks of its interface. Raises ConfigError: it needs what vLLM does not give."""
    registry = Registry()

    def made_of(other: str, values: Mapping[str, Any]) -> Any:
        config = registry.configured("drafter", other, values)
        return registry.build("drafter", registry.find("drafter", other), config, context)

    def load_runner(path: str, **_: Any) -> Any:
        raise ConfigError(f"drafter {name!r} runs a model of its own, {path}, and inside vLLM no drafter of emssd can")

    context = DrafterContext(vocab_size, None, load_runner, made_of)
    made = made_of(name, options)
    drafters: list[Drafter] = [made] if isinstance(made, Drafter) else made
    for drafter in drafters:
        for needs, what in (
            (drafter.hidden_layers, "reads hidden states of the target"),
            (drafter.num_candidates, "wants the target's candidates"),
            (drafter.drafts_trees, "drafts trees, and vLLM verifies chains"),
        ):
            if needs:
                raise ConfigError(f"drafter {name!r} cannot draft inside vLLM: it {what}; choose another, as 'suffix'")
    owner = f"{name!r} ({registry.source('drafter', name)})"
    return DraftStages([CheckedDrafter(drafter, owner, vocab_size) for drafter in drafters], FixedBudget())


def __getattr__(name: str) -> type[Proposer]:
    """``emssd.integrations.vllm.NAME`` is ``proposer(NAME)``."""
    if name.startswith("_") or name not in Registry().names("drafter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and no plugin offers such a drafter")
    return proposer(name)
