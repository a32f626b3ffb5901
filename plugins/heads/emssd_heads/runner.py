"""`HeadRunner`: a trained head and its KV."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from emssd.attention import AttentionBackend, KVUsage, PackedInputs, StepPlan
from emssd.draft_models import DraftCache, fed
from emssd.model.run.runner import likeliest, run_planned
from emssd_heads.compiled import compiled_head
from emssd_heads.head import Head
from emssd_heads.layers import Attend

__all__ = ["HeadRunner"]


class HeadRunner(DraftCache):
    """A head on one device, with its KV in an attention backend. Rows, trees and rollback are those of any model.

    Args:
        head: with its weights.
        backend: allocated for the head's `kv_cache_spec`.
        compile: run it as a compiled program, see `emssd_heads.compiled`, where that can be.
    """

    def __init__(self, head: Head, backend: AttentionBackend, *, compile: bool = False) -> None:
        super().__init__(backend)
        self.head, self._backend = head, backend
        self._compiled = compiled_head(head) if compile else None

    @property
    def usage(self) -> KVUsage:
        """KV memory taken now and at most."""
        return self._backend.kv_usage

    def run(self, packed: PackedInputs, inputs: torch.Tensor) -> torch.Tensor:
        """Compute one ragged step. The KV of its tokens stays until `commit` or `release` drops it.

        Args:
            packed: which tokens of which rows; the ids are not read.
            inputs: ``[nnz, input_size]`` on the head's device.

        Returns:
            ``[R, hidden_size]`` hidden states, one row for each of the step's ``logit_rows``.
        """
        return self._outputs(packed, inputs)[0]

    def run_to_logits(
        self, packed: PackedInputs, inputs: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `run`, and with logits.

        Args:
            packed, inputs: as in `run`.
            logits: makes them of hidden states, where a compiled program does not.

        Returns:
            ``[R, hidden_size]`` hidden states and ``[R, draft_vocab_size]`` logits.
        """
        hidden, *given = self._outputs(packed, inputs)
        return hidden, given[0] if given else logits(hidden)

    def run_chain(
        self,
        packed: PackedInputs,
        inputs: torch.Tensor,
        lengths: Seq[int],
        temperature: float,
        logits: Callable[[torch.Tensor], torch.Tensor],
        reads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """See `emssd.model.ModelRunner.run_chain`; tokens are columns of logits.

        Args:
            packed, lengths, temperature: as there.
            inputs: ``[B, input_size]`` what the first pass reads.
            logits: makes them of hidden states.
            reads: of tokens ``[n]``, and hidden states before them, what the next pass reads.
        """
        if self._compiled is not None:
            return None

        def first(plan: StepPlan) -> torch.Tensor:
            size = plan.input_ids.numel()
            return self.in_place(("chain", size), inputs, size)

        def one_pass(plan: StepPlan, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, *own = self._compute(plan, values.unsqueeze(0))
            likely = likeliest(own[0] if own else logits(hidden), 1, 1.0 / temperature)[..., 0]
            return likely, reads(likely[0].long(), hidden)

        return run_planned(self._backend, packed, lengths, first, one_pass)

    def _attend(self, plan: StepPlan) -> Attend:
        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._backend.forward(plan, layer, query, key, value)

        return attend

    def _compute(self, plan: StepPlan, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.head(inputs, plan.position_ids, self._attend(plan))[:, plan.logits_to_keep].flatten(0, 1)
        logits = self.head.own_logits(hidden)
        return (hidden,) if logits is None else (hidden, logits)

    def _outputs(self, packed: PackedInputs, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plan = self._backend.plan(packed)
        size = plan.input_ids.numel()
        inputs = fed(plan, inputs) if plan.replay is None else self.in_place(size, inputs, size)
        inputs = inputs.view(*plan.input_ids.shape, -1)
        outputs: tuple[torch.Tensor, ...]
        if self._compiled is not None:
            step = self._backend.native_step(plan)
            outputs = self._compiled(inputs, plan.position_ids, self._attend(plan), plan.logits_to_keep, step)
        elif plan.replay is None:
            outputs = self._compute(plan, inputs)
        else:
            outputs = plan.replay(lambda: self._compute(plan, inputs))
        index = plan.logit_index
        return outputs if index is None else tuple(each[index] for each in outputs)
