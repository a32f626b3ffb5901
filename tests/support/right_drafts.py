"""`Trial`: a target made by hand with a drafter that is always right, and whether all drafts were accepted.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Drafter, DrafterContext
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from tests.support.backends import context_of
from tests.support.sampling import kept_text
from tests.support.spies import failing

NUM_NEW = 31
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3], [6], [7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 1, 4, 4, 0, 6, 7]]
KINDS: dict[str, list[SamplingParams | None]] = {
    "greedy": [None] * 4,
    "sampled": [SamplingParams(temperature=1 + row, seed=row) for row in range(4)],
    "mixed": [
        None,
        SamplingParams(temperature=6.0, seed=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=3.0, top_p=0.9, frequency_penalty=0.4, logit_bias={2: 3.0}, seed=2),
    ],
}
Load = Callable[[Mapping[str, Any], DrafterContext], Drafter]


@dataclass
class Trial:
    """A target, and a drafter for it.

    Attributes:
        target: in float64; few tokens.
        depth: levels of the drafter's drafts.
        load: makes the drafter of its options.
        prompts: of four rows.
        waits: whether the first step has no draft, as the drafter reads hidden states.
        engine: the latest that was made.
    """

    target: TargetModel
    depth: int
    load: Load
    prompts: Seq[Seq[int]] = tuple(PROMPTS)
    waits: bool = True
    engine: Any = None

    def make_engine(self, options: Mapping[str, Any] | None = None, backend: Any = "ragged", **engine: Any) -> Engine:
        """An engine whose drafter has caches of its own, each as large as the target's."""
        chosen = EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | engine))
        spec, limit = self.target.kv_cache_spec(chosen.batch_size), None
        if chosen.kv_memory is not None:
            limit = int(chosen.kv_memory) // spec.bytes_per_token()
        continuous = backend != "padded"
        context = context_of(self.target, backend, chosen.batch_size, continuous=continuous, max_tokens=limit)
        made = self.load(options or {}, context)
        self.engine = Engine.assemble(self.target, None, drafter=made, backend=backend, budget="fixed", options=chosen)
        assert context.target is not None
        assert isinstance(self.engine.runner, CausalLMRunner)
        context.target.attach(self.engine.runner)
        return self.engine

    def text(self, name: str, prompt: Seq[int], params: SamplingParams | None, num: int = NUM_NEW) -> tuple[int, ...]:
        """The target's own text, decoded by hand without a cache."""
        return kept_text(self.target.model, tuple(prompt), num, params, "" if params is None else name)

    def decode_preempted(
        self, options: Mapping[str, Any] | None = None, backend: Any = "ragged", *, all_right: bool = True
    ) -> None:
        """Decode in a KV cache that has no room for all rows. No token changes; all tokens of chains are accepted."""
        limit = str(256 * self.target.kv_cache_spec(1).bytes_per_token())
        engine = self.make_engine(options, backend, kv_memory=limit, max_step_tokens=16, batch_size=3)
        found = engine.generate(self.prompts, 110, ignore_eos=True)
        for prompt, generation in zip(self.prompts, found, strict=True):
            assert generation.token_ids == self.text("", prompt, None, 110)
            assert generation.num_accepted > 0 or not all_right
            assert engine.drafting.drafts_trees or not all_right or generation.num_accepted == generation.num_drafted
        assert engine.report.num_preempted > 0

    def requests(self, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Request]:
        """One for each of `prompts`."""
        pairs = enumerate(zip(self.prompts, kinds, strict=True))
        return [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]

    def decode(self, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
        """Decode in order. Compare the tokens with `text`."""
        requests = self.requests(kinds)
        done = {generation.request_id: generation for generation in self.engine.run(requests)}
        for request in requests:
            expected = self.text(request.request_id, request.prompt_ids, request.sampling)
            assert done[request.request_id].token_ids == expected
        return [done[request.request_id] for request in requests]

    def is_full(self, depth: int | None = None) -> bool:
        """Whether every draft was accepted down to its deepest node: each step gave `depth` + 1 tokens, if a row goes
        on so far. The first one gave a single token if the drafter waits.
        """
        each = (depth or self.depth) + 1
        wanted, left = {1: 4} if self.waits else {}, (NUM_NEW - self.waits) % each
        wanted[each] = 4 * ((NUM_NEW - self.waits) // each)
        if left:
            wanted[left] = wanted.get(left, 0) + 4
        return bool(self.engine.report.acceptance_histogram == wanted)

    def failing_steps(self, patch: pytest.MonkeyPatch) -> None:
        """Decode while each third pass of the target fails; no token changes."""
        run = failing(self.engine.runner.run, torch.OutOfMemoryError("planted"), *range(2, 999, 3))
        patch.setattr(self.engine.runner, "run", run)
        for request in self.requests():
            self.engine.add(request)
        done = list[Any]()
        while self.engine.has_work:
            try:
                done += self.engine.step()
            except torch.OutOfMemoryError:
                continue
        assert len(done) == 4
        for row in done:
            assert tuple(row.output_ids) == self.text(row.request_id, row.request.prompt_ids, None)
