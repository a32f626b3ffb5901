"""A state machine that drives an attention backend through random histories beside the dense reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, PackedInputs, StepPlan
from emssd.attention.trees import path
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd_testing.conformance.rules import broken
from emssd_testing.conformance.watch import WatchedBackend, places_of
from emssd_testing.oracle import DenseBackend
from emssd_testing.strategies import Waves, kv_layers, trees

__all__ = ["BackendMachine", "MachineRow", "Turn", "moved"]

_Nodes = list[tuple[int, int]]  # of a tree: token, and index of its parent or -1


@dataclass(slots=True)
class MachineRow:
    """A sequence of tokens that are all different, so that every key ever written can be told from every other."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The draft for a row, and the path through it that is accepted."""

    row: MachineRow
    nodes: _Nodes
    nodes_accepted: list[int]

    @property
    def accepted(self) -> list[int]:
        return [self.nodes[node][0] for node in self.nodes_accepted]


class BackendMachine(RuleBasedStateMachine):
    """Random histories: prompts, ragged drafts, rollbacks, several steps before a rollback, releases, abandoned steps.

    Drafts are chains; and if the backend takes them, also trees, whose accepted paths move together.

    Each forward pass of each layer is compared with `DenseBackend` for every real token; what the plan feeds the model,
    positions, padding and the choice of logits are checked too. A failure names the broken rule, one of
    `emssd_testing.conformance.rules`. Inherit, say how to make the backend, and run it::

        class MyMachine(BackendMachine):
            def make_backend(self):
                return MyBackend()

        TestMyBackend = MyMachine.TestCase

    Attributes:
        layers: strategy of the layers of the model; draws that the backend does not support are passed over.
        dtype, device, atol: of the tensors, and the largest difference from the reference that is rounding.
        max_batch_size, max_model_len: no history goes beyond them.
        compared: the rule that a result breaks which differs.
    """

    layers: st.SearchStrategy[tuple[LayerSpec, ...]] = kv_layers()
    dtype = torch.float64
    device = torch.device("cpu")
    atol = 1e-10
    max_batch_size = 4
    max_model_len = 96
    compared = "backend.attention"

    def make_backend(self) -> AttentionBackend:
        """A backend that is not allocated yet."""
        raise NotImplementedError(f"{type(self).__name__} must say in make_backend which backend to test")

    def make_reference(self) -> AttentionBackend:
        """Another that is right, not allocated yet."""
        return DenseBackend()

    @initialize(data=st.data(), seed=st.integers(0, 2**16))
    def allocate(self, data: st.DataObject, seed: int) -> None:
        self.backend, self.reference = WatchedBackend(self.make_backend()), self.make_reference()
        for _ in range(20):  # of a backend that refuses much, whole examples would be thrown away
            layers = data.draw(self.layers, label="layers")
            self.spec = KVCacheSpec(
                layers,
                self.dtype,
                self.device,
                self.max_batch_size,
                self.max_model_len,
                trees=self.backend.takes_trees and data.draw(st.booleans(), label="trees"),
            )
            if not self.backend.unsupported(self.spec):
                break
        else:
            assume(False)
        self.backend.allocate(self.spec)
        self.reference.allocate(self.spec)
        self._rows, self._uncompared = list[MachineRow](), set[int]()
        self._num_ids = self._num_requests = 0
        self._peak = KVUsage()
        self._waves = Waves(self.spec, seed)
        for length in data.draw(st.lists(st.integers(1, 24), max_size=self.max_batch_size), label="prompts"):
            self._add(length)

    @precondition(lambda self: len(self._rows) < self.max_batch_size)
    @rule(length=st.integers(1, 24))
    def admit(self, length: int) -> None:
        self._add(length)

    @precondition(lambda self: self._rows)
    @rule(data=st.data(), num_steps=st.integers(1, 4))
    def verify(self, data: st.DataObject, num_steps: int) -> None:
        """Engine steps for some rows in any order: drafts are ragged, and each row accepts its own number of tokens."""
        rows = self._pick(data)
        for _ in range(num_steps):
            if turns := self._turns(rows, 7, data):
                self._advance(turns, [self._packed(turns)], [1] * len(turns))

    @precondition(lambda self: self._rows)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        """Act as a draft model: catch up, decode some rows further and further, and only then roll back.

        A tree grows in any of its nodes, which are cached and not committed.
        """
        if turns := self._turns(self._pick(data), 4, data):
            uncached = [data.draw(st.integers(1, 2), label="uncached") for _ in turns]
            self._advance(turns, list(self._passes(turns, data)), uncached)

    @precondition(lambda self: self._rows)
    @rule(data=st.data(), planned=st.booleans())
    def release(self, data: st.DataObject, planned: bool) -> None:
        """Rows leave: they are finished, or an error kept the step from running for which they were `planned`."""
        rows = self._pick(data)
        if planned:
            packed = pack(rows, Draft.empty(len(rows)))
            self.backend.plan(packed)
            self.reference.plan(packed)
        self._release(rows)

    @invariant()
    def memory(self) -> None:
        """Held memory covers the tokens there are, is 0 without tokens, and peaks never fall."""
        now, exact = self.backend.kv_usage, self.reference.kv_usage
        if not exact.held <= now.held <= now.peak_held <= now.peak_pool:
            broken("backend.memory", f"{now} for {exact.held} bytes of KV")
        if now.peak_held < self._peak.peak_held or now.peak_pool < self._peak.peak_pool:
            broken("backend.memory", f"the peak fell from {self._peak} to {now}")
        if now.held and not exact.held:
            broken("backend.memory", f"{now.held} bytes are held for no sequence")
        self._peak = now

    def teardown(self) -> None:
        """At the end everything can be given back."""
        if hasattr(self, "_rows") and self._rows:
            self._release(self._rows)
            self.memory()

    def _add(self, length: int) -> None:
        self._num_requests += 1
        self._rows.append(MachineRow(f"request-{self._num_requests}", self._new_ids(length)))

    def _pick(self, data: st.DataObject) -> list[MachineRow]:
        """At least one row, in any order."""
        rows = data.draw(st.permutations(self._rows), label="rows")
        return rows[: data.draw(st.integers(1, len(rows)), label="number of rows")]

    def _turns(self, rows: Seq[MachineRow], most: int, data: st.DataObject) -> list[Turn]:
        """At most so many drafted tokens for each row, with room for two of the target's own. A full row waits."""
        turns = []
        for row in rows:
            if (room := self.max_model_len - len(row.tokens) - 2) > 0:
                nodes = self._tree(data.draw(st.integers(0, min(most, room)), label="drafted"), data)
                last = data.draw(st.integers(0, len(nodes)), label="accepted") - 1
                turns.append(Turn(row, nodes, path([parent for _, parent in nodes], last)))
        return turns

    def _tree(self, num_nodes: int, data: st.DataObject) -> _Nodes:
        """Drafted tokens; where trees are drafted, some of the siblings may be equal."""
        ids = self._new_ids(num_nodes)
        if not self.spec.trees:
            return list(zip(ids, range(-1, num_nodes - 1), strict=True))
        parents = data.draw(trees(num_nodes), label="tree")
        if data.draw(st.booleans(), label="equal siblings"):
            ids = [ids[parents.index(parent)] for parent in parents]
        return list(zip(ids, parents, strict=True))

    def _packed(self, turns: Seq[Turn]) -> PackedInputs:
        """The step that verifies all that is drafted."""
        drafted = [turn.nodes for turn in turns]
        draft = Draft.from_trees(drafted) if self.spec.trees else Draft.from_chains(_tokens(nodes) for nodes in drafted)
        return pack([turn.row for turn in turns], draft)

    def _passes(self, turns: Seq[Turn], data: st.DataObject) -> Iterator[PackedInputs]:
        """The steps that draft it: the rows catch up; then each grows by one node, or, a tree, by several at a time."""
        yield pack([turn.row for turn in turns], Draft.empty(len(turns)))
        left = [(turn, 0) for turn in turns if turn.nodes]
        while left:
            most = [len(turn.nodes) - done if self.spec.trees else 1 for turn, done in left]
            lengths = [data.draw(st.integers(1, number), label="new nodes") for number in most]
            grown = [(turn, done + more) for (turn, done), more in zip(left, lengths, strict=True)]
            yield pack_nodes(
                [turn.row.request_id for turn, _ in grown],
                torch.tensor([token for (turn, end), more in zip(grown, lengths, strict=True)
                              for token in _tokens(turn.nodes[end - more : end])]),
                lengths,
                [len(turn.row.tokens) + end for turn, end in grown],
                [[parent for _, parent in turn.nodes[:end]] for turn, end in grown] if self.spec.trees else None,
            )  # fmt: skip
            left = [(turn, end) for turn, end in grown if end < len(turn.nodes)]

    def _advance(self, turns: Seq[Turn], steps: Seq[PackedInputs], uncached: Seq[int]) -> None:
        """Compute the steps, keep what is accepted, and give each row its number of tokens that are not cached yet."""
        self._compute(turns, steps)
        sources = tuple(moved(len(turn.row.tokens), turn.nodes_accepted) for turn in turns)
        for turn, count in zip(turns, uncached, strict=True):
            turn.row.num_cached = len(turn.row.tokens) + len(turn.nodes_accepted)
            turn.row.tokens = [*turn.row.tokens, *turn.accepted, *self._new_ids(count)]
        names, kv_lens = tuple(turn.row.request_id for turn in turns), tuple(turn.row.num_cached for turn in turns)
        self._commit(Kept(names, kv_lens, sources if any(sources) else ()))

    def _compute(self, turns: Seq[Turn], steps: Seq[PackedInputs]) -> None:
        """Compute the steps of these turns on both backends, and compare what they give for each token."""
        for packed in steps:
            pairs = zip(self._results(self.backend, packed), self._results(self.reference, packed), strict=True)
            for layer, (results, right) in enumerate(pairs):
                self._compare(packed, layer, results, right)

    def _results(self, backend: AttentionBackend, packed: PackedInputs) -> Iterator[torch.Tensor]:
        """``[num_tokens, num_qo_heads, value_dim]`` of each layer."""
        plan = self._plan(backend, packed)
        places = places_of(plan, packed)
        for layer in range(len(self.spec.layers)):
            yield self._forward(backend, plan, layer)[places]

    def _plan(self, backend: AttentionBackend, packed: PackedInputs) -> StepPlan:
        return backend.plan(packed)

    def _forward(self, backend: AttentionBackend, plan: StepPlan, layer: int) -> torch.Tensor:
        return backend.forward(plan, layer, *self._waves.qkv(plan.input_ids.flatten(), layer))

    def _compare(self, packed: PackedInputs, layer: int, results: torch.Tensor, right: torch.Tensor) -> None:
        errors = (results - right).abs().flatten(1).amax(dim=1).tolist()
        for token, error in zip(packed.input_ids.tolist(), errors, strict=True):
            if not error <= self.atol and token not in self._uncompared:
                spec = self.spec.layers[layer]
                broken(self.compared, f"layer {layer} ({spec}) is off by {error:.3g} for token {token} of {packed}")

    def _commit(self, kept: Kept) -> None:
        self.backend.commit(kept)
        self.reference.commit(kept)

    def _release(self, rows: Iterable[MachineRow]) -> None:
        request_ids = [row.request_id for row in rows]
        for backend in (self.backend, self.reference):
            backend.release([*request_ids, "never seen"])
        self._rows = [row for row in self._rows if row.request_id not in request_ids]
        if (held := self.backend.kv_usage.held) and not self.reference.kv_usage.held:
            broken("backend.release", f"{held} bytes are held after the last sequence was released")

    def _new_ids(self, count: int) -> list[int]:
        self._num_ids += count
        return list(range(self._num_ids - count, self._num_ids))


def _tokens(nodes: _Nodes) -> list[int]:
    return [token for token, _ in nodes]


def moved(num_tokens: int, nodes: Seq[int]) -> tuple[int, ...]:
    """The KV of accepted `nodes` after `num_tokens` tokens, as `Kept.sources`."""
    return () if list(nodes) == list(range(len(nodes))) else tuple(num_tokens + node for node in nodes)
