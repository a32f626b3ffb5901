"""What tests of drafters with hand-made heads share: engines of four uneven rows, and whether all drafts were right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from emssd.attention import PackedInputs
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.decoding.verify import Verified
from emssd.drafting import Drafter, DrafterContext, HiddenStates, Outcome
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Batch, Generation, Request
from tests.support import sampling as reference

__all__ = ["KINDS", "NUM_NEW", "PROMPTS", "Trial", "earlier_states", "states_of_other_nodes"]

NUM_NEW = 31
PROMPTS = [
    [1, 3, 4, 6, 0, 7, 8, 3],
    [6, 6, 1, 0, 8, 7, 4],
    [7, 8, 3, 1, 0, 4, 4, 6, 1, 7, 3],
    [0, 1, 2, 3, 4, 5, 6, 7, 8] * 2,
]
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


@dataclass
class Trial:
    """A target, and a drafter for it.

    Attributes:
        target: in float64, with a vocabulary of 9.
        depth: levels of the drafter's drafts.
        load: makes the drafter of its options.
        prompts: of four rows.
        engine: the latest that was made.
    """

    target: TargetModel
    depth: int
    load: Callable[[Mapping[str, Any], DrafterContext], Drafter]
    prompts: Seq[Seq[int]] = tuple(PROMPTS)
    engine: Any = None
    _texts: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def make_engine(self, options: Mapping[str, Any], backend: str = "ragged", **engine: Any) -> Engine:
        """An engine whose drafter has a cache of its own, as large as the target's."""
        chosen = EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | engine))
        spec, limit = self.target.kv_cache_spec(chosen.batch_size), None
        if chosen.kv_memory is not None:
            limit = int(chosen.kv_memory) // spec.bytes_per_token()
        context = DrafterContext(
            self.target.vocab_size,
            None,
            lambda path: pytest.fail("asks for no model"),
            lambda name, values: pytest.fail("asks for no other"),
            "fail",
            BorrowedTarget(self.target),
            replace(spec, continuous=backend == "ragged", max_tokens=limit),
            lambda own: make_backend(own, backend, Registry()),
        )
        made = self.load(options, context)
        self.engine = Engine.assemble(self.target, None, drafter=made, backend=backend, budget="fixed", options=chosen)
        return self.engine

    def text(
        self, name: str, prompt: Seq[int], params: SamplingParams | None, num_new: int = NUM_NEW
    ) -> tuple[int, ...]:
        """What the target says by itself, decoded by hand and without a cache."""
        key = (None if params is None else name, tuple(prompt), repr(params))
        if len(self._texts.get(key, ())) < num_new:
            self._texts[key] = reference.sampled(self.target.model, prompt, num_new, params, name)
        return self._texts[key][:num_new]

    def decode_preempted(self, options: Mapping[str, Any], num_new: int = 90) -> None:
        """Decode chains in a KV cache that has no room for all rows; no token changes, and each draft is accepted."""
        limit = str(256 * self.target.kv_cache_spec(1).bytes_per_token())
        engine = self.make_engine(options, kv_memory=limit, max_step_tokens=16, batch_size=3)
        for prompt, generation in zip(
            self.prompts, engine.generate(self.prompts, num_new, ignore_eos=True), strict=True
        ):
            assert generation.token_ids == self.text("", prompt, None, num_new)
            assert generation.num_accepted == generation.num_drafted > 0
        assert engine.report.num_preempted > 0

    def requests(self, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Request]:
        """One for each of `prompts`."""
        pairs = enumerate(zip(self.prompts, kinds, strict=True))
        return [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]

    def decode(self, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
        """In order; every token is that of decoding by hand."""
        requests = self.requests(kinds)
        done = {generation.request_id: generation for generation in self.engine.run(requests)}
        for request in requests:
            expected = self.text(request.request_id, request.prompt_ids, request.sampling)
            assert done[request.request_id].token_ids == expected
        return [done[request.request_id] for request in requests]

    def is_full(self) -> bool:
        """Whether every draft was accepted down to its deepest node.

        A row gives one token in its first step, which has no draft, and then `depth` + 1 in each, as far as it goes.
        """
        left = (NUM_NEW - 1) % (self.depth + 1)
        wanted = {1: 4, self.depth + 1: 4 * ((NUM_NEW - 1) // (self.depth + 1))}
        if left:
            wanted[left] = wanted.get(left, 0) + 4
        return bool(self.engine.report.acceptance_histogram == wanted)

    def failing_steps(self, patch: pytest.MonkeyPatch) -> None:
        """Decode while each third pass of the target fails; no token changes."""
        run, calls = self.engine.runner.run, list[int]()

        def fails(packed: PackedInputs) -> Any:
            calls.append(1)
            if len(calls) % 3 == 0:
                raise torch.OutOfMemoryError("planted")
            return run(packed)

        patch.setattr(self.engine.runner, "run", fails)
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


def earlier_states(drafter: type[Drafter]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault: the hidden state of token i - 1 in the place of that of token i."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        observe, latest = drafter.observe, dict[str, torch.Tensor]()

        def shifted(self: Any, outcome: Outcome) -> None:
            hidden = outcome.hidden
            assert isinstance(hidden, HiddenStates)
            moved = hidden.states[0].clone()
            for (name, start, (own,)), begin in zip(hidden.rows(), hidden.indptr, strict=False):
                moved[begin : begin + len(own)] = torch.cat([latest[name] if start else own[:1], own])[:-1]
                latest[name] = own[-1:]
            observe(self, replace(outcome, hidden=replace(hidden, states=(moved,))))

        patch.setattr(drafter, "observe", shifted)

    return plant


def states_of_other_nodes(patch: pytest.MonkeyPatch) -> None:
    """A fault: hidden states of a draft's last nodes in the place of those that were accepted."""
    import emssd.decoding.outcome

    hidden_of = emssd.decoding.outcome._hidden

    def last_nodes(batch: Batch, verified: Seq[Verified], *others: Any) -> HiddenStates:
        lengths = [(len(each.drafted), len(each.accepted)) for each in verified]
        last = [range(length - accepted, length) for length, accepted in lengths]
        wrong = [replace(each, accepted=nodes) for each, nodes in zip(verified, last, strict=True)]
        return hidden_of(batch, wrong, *others)

    patch.setattr(emssd.decoding.outcome, "_hidden", last_nodes)
