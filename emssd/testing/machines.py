"""A state machine that drives an attention backend through random histories beside the dense reference."""

from __future__ import annotations

from collections.abc import Iterable
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
from emssd.testing.conformance.rules import assertions, broken
from emssd.testing.oracle import DenseBackend
from emssd.testing.strategies import Waves, kv_layers, trees

__all__ = ["BackendMachine", "MachineRow", "check_plan", "moved"]

_Nodes = list[tuple[int, int]]  # of a tree: token, and index of its parent or -1


@dataclass(slots=True)
class MachineRow:
    """A sequence of tokens that are all different, so that every key ever written can be told from every other."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0


class BackendMachine(RuleBasedStateMachine):
    """Random histories: prompts, ragged drafts, rollbacks, several steps before a rollback, releases, abandoned steps.

    Drafts are chains; and if the backend takes them, also trees, whose accepted paths move together.

    Each forward pass of each layer is compared with `DenseBackend` for every real token; what the plan feeds the model,
    positions, padding and the choice of logits are checked too. A failure names the broken rule, one of
    `emssd.testing.conformance.rules`. Inherit, say how to make the backend, and run it::

        class MyMachine(BackendMachine):
            def make_backend(self):
                return MyBackend()

        TestMyBackend = MyMachine.TestCase

    Attributes:
        layers: strategy of the layers of the model; draws that the backend does not support are passed over.
        dtype, device, atol: of the tensors, and the largest difference from the reference that is rounding.
        max_batch_size, max_model_len: no history goes beyond them.
    """

    layers: st.SearchStrategy[tuple[LayerSpec, ...]] = kv_layers()
    dtype = torch.float64
    device = torch.device("cpu")
    atol = 1e-10
    max_batch_size = 4
    max_model_len = 96

    def make_backend(self) -> AttentionBackend:
        """A backend that is not allocated yet."""
        raise NotImplementedError(f"{type(self).__name__} must say in make_backend which backend to test")

    @initialize(data=st.data(), seed=st.integers(0, 2**16))
    def allocate(self, data: st.DataObject, seed: int) -> None:
        """Begin with an empty cache for drawn layers."""
        self.backend, self.dense = self.make_backend(), DenseBackend()
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
            served = self.backend.takes_sinks or not self.spec.has_sinks
            if served and not self.backend.unsupported(self.spec):
                break
        else:
            assume(False)
        self.backend.allocate(self.spec)
        self.dense.allocate(self.spec)
        self._rows: list[MachineRow] = []
        self._num_ids = self._num_requests = 0
        self._peak = KVUsage()
        self._waves = Waves(self.spec, seed)

    @precondition(lambda self: len(self._rows) < self.max_batch_size)
    @rule(length=st.integers(1, 24))
    def admit(self, length: int) -> None:
        """A new sequence with a prompt."""
        self._num_requests += 1
        self._rows.append(MachineRow(f"request-{self._num_requests}", self._new_ids(length)))

    @precondition(lambda self: self._rows)
    @rule(data=st.data(), num_steps=st.integers(1, 4))
    def verify(self, data: st.DataObject, num_steps: int) -> None:
        """Engine steps for some rows in any order: drafts are ragged, and each row accepts its own number of tokens."""
        rows = self._pick(data)
        for _ in range(num_steps):
            self._verify([row for row in rows if self._room(row) > 0], data)

    def _verify(self, rows: list[MachineRow], data: st.DataObject) -> None:
        if not rows:
            return
        lengths = [data.draw(st.integers(0, min(7, self._room(row))), label="drafted") for row in rows]
        drafted = [self._tree(length, data) for length in lengths]
        if self.spec.trees:
            self._step(pack(rows, Draft.from_trees(drafted)))
        else:
            self._step(pack(rows, Draft.from_chains([[token for token, _ in nodes] for nodes in drafted])))
        sources = []
        for row, nodes in zip(rows, drafted, strict=True):
            way = path([parent for _, parent in nodes], data.draw(st.integers(0, len(nodes)), label="accepted") - 1)
            sources.append(moved(len(row.tokens), way))
            row.num_cached = len(row.tokens) + len(way)
            row.tokens = row.tokens + [nodes[node][0] for node in way] + self._new_ids(1)
        self._commit(rows, sources)

    @precondition(lambda self: self._rows)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        """Act as a draft model: catch up, decode some rows further and further, and only then roll back.

        A tree grows in any of its nodes, which are cached and not committed.
        """
        rows = [row for row in self._pick(data) if self._room(row) > 0]
        if not rows:
            return
        wanted = [data.draw(st.integers(1, min(5, self._room(row))), label="drafted") - 1 for row in rows]
        self._step(pack(rows, Draft.empty(len(rows))))
        grown: list[_Nodes] = [[] for _ in rows]
        while active := [i for i, nodes in enumerate(grown) if len(nodes) < wanted[i]]:
            lengths = [self._grow(grown[i], wanted[i], data) for i in active]
            ids = [token for i, length in zip(active, lengths, strict=True) for token, _ in grown[i][-length:]]
            names, kv_lens = zip(
                *[(rows[i].request_id, len(rows[i].tokens) + len(grown[i])) for i in active], strict=True
            )
            parents = [[parent for _, parent in grown[i]] for i in active] if self.spec.trees else None
            self._step(pack_nodes(names, torch.tensor(ids), lengths, kv_lens, parents))
        sources = []
        for row, nodes in zip(rows, grown, strict=True):
            way = path([parent for _, parent in nodes], data.draw(st.integers(0, len(nodes)), label="kept") - 1)
            sources.append(moved(len(row.tokens), way))
            row.num_cached = len(row.tokens) + len(way)
            num_uncached = data.draw(st.integers(1, 2), label="uncached")
            row.tokens = row.tokens + [nodes[node][0] for node in way] + self._new_ids(num_uncached)
        self._commit(rows, sources)

    @precondition(lambda self: self._rows)
    @rule(data=st.data(), planned=st.booleans())
    def release(self, data: st.DataObject, planned: bool) -> None:
        """Rows leave: they are finished, or an error kept the step from running for which they were `planned`."""
        rows = self._pick(data)
        if planned:
            packed = pack(rows, Draft.empty(len(rows)))
            self.backend.plan(packed)
            self.dense.plan(packed)
        self._release(rows)

    @invariant()
    def memory(self) -> None:
        """Held memory covers the tokens there are, is 0 without tokens, and peaks never fall."""
        now, exact = self.backend.kv_usage, self.dense.kv_usage
        with assertions("backend.memory"):
            assert exact.held <= now.held <= now.peak_held <= now.peak_pool, f"{now} for {exact.held} bytes of KV"
            assert now.peak_held >= self._peak.peak_held, f"the peak fell from {self._peak} to {now}"
            assert now.peak_pool >= self._peak.peak_pool, f"the peak fell from {self._peak} to {now}"
            assert exact.held or not now.held, f"{now.held} bytes are held for no sequence"
        self._peak = now

    def teardown(self) -> None:
        """At the end everything can be given back."""
        if hasattr(self, "_rows") and self._rows:
            self._release(self._rows)
            self.memory()

    def _pick(self, data: st.DataObject) -> list[MachineRow]:
        """At least one row, in any order."""
        rows = data.draw(st.permutations(self._rows), label="rows")
        return rows[: data.draw(st.integers(1, len(rows)), label="number of rows")]

    def _room(self, row: MachineRow) -> int:
        """The most tokens to draft for a row, so that two of the target's own still fit. A full row waits."""
        return self.max_model_len - len(row.tokens) - 2

    def _step(self, packed: PackedInputs) -> None:
        plan, expected = self.backend.plan(packed), self.dense.plan(packed)
        with assertions("backend.plan"):
            places = check_plan(plan, packed)
        ids, dense_ids = plan.input_ids.flatten(), expected.input_ids.flatten()
        for layer, spec in enumerate(self.spec.layers):
            out = self.backend.forward(plan, layer, *self._waves.qkv(ids, layer))
            right = self.dense.forward(expected, layer, *self._waves.qkv(dense_ids, layer))
            with assertions("backend.output"):
                assert out.shape == (len(ids), spec.num_qo_heads, spec.value_dim)
                assert bool(out.isfinite().all()), "an output, if only of a padding token, is not finite"
            for token, candidates in enumerate(places):
                errors = (out[candidates] - right[token]).abs().flatten(1).amax(dim=1)
                if not float(errors.min()) <= self.atol:
                    broken(
                        "backend.attention",
                        f"layer {layer} ({spec}) is off by {float(errors.min()):.3g} for token {token} of {packed}",
                    )

    def _tree(self, num_nodes: int, data: st.DataObject) -> _Nodes:
        """Drafted tokens; where trees are drafted, some of the siblings may be equal."""
        ids = self._new_ids(num_nodes)
        if not self.spec.trees:
            return list(zip(ids, range(-1, num_nodes - 1), strict=True))
        parents = data.draw(trees(num_nodes), label="tree")
        if data.draw(st.booleans(), label="equal siblings"):
            ids = [ids[parents.index(parent)] for parent in parents]
        return list(zip(ids, parents, strict=True))

    def _grow(self, nodes: _Nodes, wanted: int, data: st.DataObject) -> int:
        """Add one node, or, to a tree, several with any parents. Returns how many."""
        if not self.spec.trees:
            nodes.append((self._new_ids(1)[0], len(nodes) - 1))
            return 1
        number = data.draw(st.integers(1, wanted - len(nodes)), label="new nodes")
        for token in self._new_ids(number):
            nodes.append((token, data.draw(st.integers(-1, len(nodes) - 1), label="parent")))
        return number

    def _commit(self, rows: Seq[MachineRow], sources: Seq[tuple[int, ...]]) -> None:
        kept = Kept(
            tuple(row.request_id for row in rows),
            tuple(row.num_cached for row in rows),
            tuple(sources) if any(sources) else (),
        )
        self.backend.commit(kept)
        assert self.backend.kv_usage.padding >= 0
        self.dense.commit(kept)

    def _release(self, rows: Iterable[MachineRow]) -> None:
        request_ids = [row.request_id for row in rows]
        for backend in (self.backend, self.dense):
            backend.release([*request_ids, "never seen"])
        self._rows = [row for row in self._rows if row.request_id not in request_ids]
        if (held := self.backend.kv_usage.held) and not self.dense.kv_usage.held:
            broken("backend.release", f"{held} bytes are held after the last sequence was released")

    def _new_ids(self, count: int) -> list[int]:
        self._num_ids += count
        return list(range(self._num_ids - count, self._num_ids))


def moved(num_tokens: int, nodes: Seq[int]) -> tuple[int, ...]:
    """The KV of accepted `nodes` behind `num_tokens` tokens, as `Kept.sources`."""
    return () if list(nodes) == list(range(len(nodes))) else tuple(num_tokens + node for node in nodes)


def check_plan(plan: StepPlan, packed: PackedInputs) -> list[list[int]]:
    """Check what the model is fed. Returns for each packed token its place, as a list, in the flattened input."""
    assert plan.input_ids.shape == plan.position_ids.shape
    rows, columns = plan.input_ids.shape
    pairs = list(zip(packed.input_ids.tolist(), packed.position_ids.tolist(), strict=True))
    fed = list(zip(plan.input_ids.flatten().tolist(), plan.position_ids.flatten().tolist(), strict=True))
    assert min(token for token, _ in fed) >= 0, "padding must be a token of the vocabulary"
    places = [[place for place, pair in enumerate(fed) if pair == wanted] for wanted in pairs]
    assert all(places), f"tokens {pairs} at their positions are not all among those fed: {fed}"
    keep = plan.logits_to_keep.tolist()
    projected = [row * columns + column for row in range(rows) for column in keep]
    chosen = slice(None) if plan.logit_index is None else plan.logit_index
    index = range(len(projected))[chosen] if isinstance(chosen, slice) else chosen.tolist()
    wanted_rows = packed.logit_rows.tolist()
    assert len(index) == len(wanted_rows), f"{len(index)} rows of logits for {len(wanted_rows)} tokens"
    for token, place in zip(wanted_rows, index, strict=True):
        assert projected[place] in places[token], f"the logits of token {token} are taken from {fed[projected[place]]}"
        places[token] = [projected[place]]
    numbered = torch.arange(len(fed), device=plan.input_ids.device)
    for token, place in enumerate(plan.packed(numbered, packed.num_tokens).tolist()):
        assert place in places[token], f"token_index finds token {token} at {fed[place]}, and it is {pairs[token]}"
        places[token] = [place]
    return places
