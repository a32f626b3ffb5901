"""`AttentionBackendConformance`: the tests that every attention backend must pass, to be inherited by its author."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, LayerSpec
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from emssd_testing.conformance.machine import Addition, TwiceMachine
from emssd_testing.conformance.rules import BrokenRule, broken, broken_rule, named
from emssd_testing.conformance.setting import decode, runs
from emssd_testing.conformance.suite import Suite
from emssd_testing.conformance.watch import WatchedBackend
from emssd_testing.machines import BackendMachine
from emssd_testing.strategies import drafters, kv_layers

__all__ = ["AttentionBackendConformance"]

_LIMIT = 160  # tokens that all sequences together may hold, where limits are tested
_ONE_LAYER = (LayerSpec(2, 1, 4, 4, 0.5),)
_rule = pytest.mark.emssd_rule


class AttentionBackendConformance(Suite):
    """Tests of an attention backend, with chains, and with token trees if it takes them. Inherit, and say which::

        class TestMine(AttentionBackendConformance):
            plugin = "mine"                               # one that is installed

        class TestAnother(AttentionBackendConformance):   # or one that is not
            def make_backend(self):
                return AnotherBackend()

    Each failure names the rule that was broken; docs/reference/backend_rules.md explains them.

    Attributes:
        layers, dtype, device, atol: as of `BackendMachine`. Greedy decoding is compared in float64 on the CPU only,
            where rounding decides nothing.
    """

    kind = "backend"
    layers: ClassVar[st.SearchStrategy[tuple[LayerSpec, ...]]] = kv_layers()
    dtype: ClassVar[torch.dtype] = torch.float64
    device: ClassVar[torch.device] = torch.device("cpu")
    atol: ClassVar[float] = 1e-10

    def make_backend(self) -> AttentionBackend:
        """A new backend that is not allocated yet; called many times."""
        spec, config = self.spec(), self.make_config()
        made: AttentionBackend = spec.build(config)
        return made

    @_rule("backend.build")
    def test_it_is_built(self) -> None:
        """Twice, so that nothing is shared."""
        self._backend()

    @_rule("backend.unsupported")
    def test_it_says_what_it_cannot_serve(self) -> None:
        """Reasons in words, and the same ones when asked again."""

        def check(data: st.DataObject) -> None:
            spec = self._spec(data.draw(self.layers, label="layers"))
            trees = self._backend().takes_trees
            for limited in (spec, dataclasses.replace(spec, continuous=True, max_tokens=_LIMIT, trees=trees)):
                backend = self._backend()
                reasons = backend.unsupported(limited)
                if reasons != backend.unsupported(limited):
                    broken("backend.unsupported", f"unsupported said {reasons}, and another thing when asked again")
                if not reasons:
                    backend.allocate(limited)

        self._examples(10, check)

    @_rule("backend.plan", "backend.output", "backend.attention", "backend.commit", "backend.memory",
           "backend.release", "backend.process", "backend.raises")  # fmt: skip
    def test_it_equals_the_dense_reference_after_any_history(self) -> None:
        """Prompts, ragged drafts, rollbacks, several steps before a rollback, releases, abandoned steps."""
        self._play(BackendMachine, 20, 12)

    @_rule("backend.isolation")
    def test_no_query_sees_what_is_not_its_own(self) -> None:
        """The keys and values of other rows, of rejected tokens and of earlier rows may be NaN."""
        self._twice("backend.isolation", "bad tokens")

    @_rule("backend.retry")
    def test_a_step_that_failed_never_happened(self) -> None:
        """Steps are planned, computed up to some layer, and given up; then others are planned for the same rows."""
        self._twice("backend.retry", "failed steps")

    @_rule("backend.batch_invariant")
    def test_bits_are_those_of_a_row_alone(self) -> None:
        """The bits of each token are those of its row alone, fed token by token, if the backend says so."""
        spec = self._spec(_ONE_LAYER)
        if (backend := self._backend()).unsupported(spec):
            pytest.skip("it does not serve the layer by which it is asked; set dtype or device of the suite")
        backend.allocate(spec)
        if not backend.backend.batch_invariant:
            pytest.skip("it does not say that it is batch_invariant")
        self._twice("backend.batch_invariant", "rows alone", atol=0.0)

    @_rule("backend.fits")
    def test_what_fits_is_planned_within_the_limit(self) -> None:
        """Rows of any lengths under a limit of memory, admitted as `fits` says."""
        limited = dataclasses.replace(self._spec(_ONE_LAYER), continuous=True, max_tokens=_LIMIT)
        if reasons := self._backend().unsupported(limited):
            pytest.skip(f"it keeps to no limit of memory: {'; '.join(reasons)}")

        def check(data: st.DataObject) -> None:
            layers = data.draw(self.layers, label="layers")
            spec = dataclasses.replace(self._spec(layers), continuous=True, max_tokens=_LIMIT)
            backend = self._backend()
            if backend.unsupported(spec):
                return
            backend.allocate(spec)
            self._fill(data, backend, _LIMIT * spec.bytes_per_token())

        self._examples(15, check)

    @_rule("backend.lossless")
    def test_tokens_equal_plain_greedy(self) -> None:
        """Hypothesis chooses the batch, the model and the drafter."""

        def check(data: st.DataObject) -> None:
            run = data.draw(runs(self.models), label="run")
            if self._backend().unsupported(run.setting.target.kv_cache_spec(run.batch_size)):
                return
            takes_trees = self._backend().takes_trees
            any_drafter = drafters(run.setting.target.vocab_size, run.setting.references, with_trees=takes_trees)
            drafter = data.draw(any_drafter, label="drafter")
            decode(run, self._backend, drafter, "backend.lossless")

        spec = KVCacheSpec((LayerSpec(4, 2, 8, 8, 0.35),), torch.float64, torch.device("cpu"), 4, 64)
        if reasons := self._backend().unsupported(spec):
            pytest.skip(f"it does not serve float64 on the CPU, where tokens can be compared exactly: {reasons[0]}")
        self._examples(12, check)

    def _twice(self, rule: str, addition: Addition, **changes: Any) -> None:
        """Play any history on two backends, on one of them with an addition that must change nothing.

        If the backend is wrong without any addition, that is the reason, and the rule that is named.
        """
        try:
            self._play(TwiceMachine, 15, 8, compared=rule, addition=addition, **changes)
        except BrokenRule:
            self.num_examples = None  # type: ignore[misc]  # of this test only
            self._play(BackendMachine, 20, 12)
            raise

    def _play(self, machine: type[BackendMachine], num_examples: int, num_steps: int, **changes: Any) -> None:
        """Random histories. Of several failures, one that breaks a rule is named."""
        common = {"layers": self.layers, "dtype": self.dtype, "device": self.device, "atol": self.atol}
        made = type("Machine", (machine,), {"make_backend": lambda _: self._backend().backend, **common, **changes})
        try:
            run_state_machine_as_test(made, settings=self._settings(num_examples, stateful_step_count=num_steps))
        except Unsatisfiable:
            pytest.skip("it supports none of the layers that were drawn; set layers, dtype or device of the suite")
        except ExceptionGroup as error:
            if (rule := broken_rule(error)) is None:
                raise
            raise rule from error

    def _fill(self, data: st.DataObject, backend: WatchedBackend, limit: int) -> None:
        """Rows are added as long as they fit, grow, and go."""
        rows: list[Row] = []
        if not backend.fits({}):
            broken("backend.fits", "fits says that no sequences at all have no room")
        for number in range(data.draw(st.integers(1, 8), label="steps")):
            row = Row(Request(f"r{number}", (1,) * data.draw(st.integers(1, 70), label="prompt"), 20))
            lengths = {row.request_id: len(row.tokens) + 1 for row in rows}
            if len(rows) < 4 and backend.fits(lengths | {row.request_id: len(row.tokens)}):
                rows.append(row)
            while rows and not backend.fits({row.request_id: len(row.tokens) for row in rows}):
                backend.release([rows.pop().request_id])
            if not rows:
                continue
            with named("backend.fits", f"a step to {[len(row.tokens) for row in rows]} tokens, which fits allows,"):
                backend.backend.plan(pack(rows, Draft.empty(len(rows))))
            for row in rows:
                row.advance([1], None, num_drafted=0, num_accepted=0)
            backend.commit(Kept(tuple(row.request_id for row in rows), tuple(row.num_cached for row in rows)))
            if (usage := backend.kv_usage).peak_pool > limit:
                broken("backend.fits", f"{usage.peak_pool} bytes were allocated under a limit of {limit}")

    def _backend(self) -> WatchedBackend:
        return WatchedBackend(self._built(self.make_backend, AttentionBackend))

    def _spec(self, layers: tuple[LayerSpec, ...]) -> KVCacheSpec:
        return KVCacheSpec(layers, self.dtype, self.device, 4, 96)
