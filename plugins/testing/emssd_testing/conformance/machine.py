"""Random histories on two backends that are made alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar, Literal

import torch
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, Kept, PackedInputs, StepPlan
from emssd.decoding.packing import pack_nodes
from emssd_testing.conformance.rules import named
from emssd_testing.conformance.watch import WatchedBackend
from emssd_testing.machines import BackendMachine, MachineRow, Turn

__all__ = ["Addition", "TwiceMachine"]

Addition = Literal["bad tokens", "failed steps", "rows alone"]

_BAD = (float("nan"), float("inf"), float("-inf"))


class TwiceMachine(BackendMachine):
    """The same history on two backends that are made alike.

    Attributes:
        addition: what happens on the one and not on the other. Keys and values of rejected tokens, and all those of
            every other row, are no numbers; steps are attempted before, and fail in the middle; or each row is fed
            alone, token by token, without its rejected ones.
    """

    addition: ClassVar[Addition]

    def make_reference(self) -> AttentionBackend:
        return WatchedBackend(self.make_backend())

    def memory(self) -> None:
        """Both hold what they hold."""

    def _turns(self, rows: Seq[MachineRow], most: int, data: st.DataObject) -> list[Turn]:
        fails = self.addition == "failed steps" and data.draw(st.booleans(), label="fails")
        if fails and (failed := super()._turns(rows, most, data)):
            plan = self._plan(self.backend, self._packed(failed))
            for layer in range(data.draw(st.integers(0, len(self.spec.layers)), label="layers")):
                self._forward(self.backend, plan, layer)
        return super()._turns(rows, most, data)

    def _compute(self, turns: Seq[Turn], steps: Seq[PackedInputs]) -> None:
        if self.addition == "bad tokens":
            for row, nodes, accepted in ((turn.row, turn.nodes, turn.accepted) for turn in turns):
                is_sick = int(row.request_id.rpartition("-")[2]) % 2 == 0
                self._uncompared.update(row.tokens if is_sick else ())
                self._uncompared.update(token for token, _ in nodes if is_sick or token not in accepted)
        if self.addition != "rows alone":
            super()._compute(turns, steps)
            return
        usual = [(packed, list(self._results(self.reference, packed))) for packed in steps]
        alone = self._alone(turns)
        for packed, layers in usual:
            for layer, right in enumerate(layers):
                results = right.clone()
                for index, token in enumerate(packed.input_ids.tolist()):
                    if token in alone:
                        results[index] = alone[token][layer]
                self._compare(packed, layer, results, right)

    def _alone(self, turns: Seq[Turn]) -> dict[int, list[torch.Tensor]]:
        results = {}
        for row, accepted in ((turn.row, turn.accepted) for turn in turns):
            new = [*row.tokens[row.num_cached :], *accepted]
            for length, token in enumerate(new, start=row.num_cached + 1):
                packed = pack_nodes((row.request_id,), torch.tensor([token]), [1], [length])
                results[token] = [result[0] for result in self._results(self.backend, packed)]
                self.backend.commit(Kept(packed.request_ids, packed.kv_lens))
        return results

    def _commit(self, kept: Kept) -> None:
        self.reference.commit(kept)
        self.backend.commit(Kept(kept.request_ids, kept.kv_lens) if self.addition == "rows alone" else kept)

    def _plan(self, backend: AttentionBackend, packed: PackedInputs) -> StepPlan:
        if self.addition != "failed steps" or backend is self.reference:
            return super()._plan(backend, packed)
        with named("backend.retry", "plan, where a step before may have failed,"):  # or "no legal call raises"
            return self.backend.backend.plan(packed)

    def _forward(self, backend: AttentionBackend, plan: StepPlan, layer: int) -> torch.Tensor:
        if self.addition != "bad tokens" or backend is self.reference:
            return super()._forward(backend, plan, layer)
        ids = plan.input_ids.flatten()
        bad = torch.tensor([token in self._uncompared for token in ids.tolist()], device=ids.device)
        qkv = self._waves.qkv(ids, layer)
        for tensor in qkv:
            tensor[bad] = _BAD[self._num_requests % len(_BAD)]
        with named("backend.raises", f"forward of layer {layer}"):
            return self.backend.backend.forward(plan, layer, *qkv)
