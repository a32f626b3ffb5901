"""`HeadRunner`: a trained head and its KV."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch

from emssd.attention import AttentionBackend, KVUsage, PackedInputs, StepPlan
from emssd.draft_models import DraftCache, fed
from emssd.model.run.runner import likeliest, run_planned
from emssd_heads.compiled import compiled_head
from emssd_heads.head import Head

__all__ = ["HeadRunner"]


class HeadRunner(DraftCache):
    """A head with its KV in an attention backend, which is allocated for the head's `kv_cache_spec`.

    With `compile`, it runs as a compiled program if that is possible, see `emssd_heads.compiled`.
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
        """Compute one ragged step of ``inputs [nnz, input_size]``. Its KV stays until `commit` or `release` drops it.

        Returns the hidden states ``[R, hidden_size]`` of the step's ``logit_rows``. Ids in `packed` are not read.
        """
        return self._outputs(packed, inputs)[0]

    def run_to_logits(
        self, packed: PackedInputs, inputs: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `run`, and with logits ``[R, draft_vocab_size]``, of the head's own or made by `logits`."""
        hidden, *made = self._outputs(packed, inputs)
        return hidden, made[0] if made else logits(hidden)

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

        The first pass has ``inputs [B, input_size]``; `reads` makes a pass's inputs of tokens ``[n]`` and of the hidden
        states before them, and `logits` makes logits of hidden states.
        """
        if self._compiled is not None:
            return None

        def first(plan: StepPlan) -> torch.Tensor:
            size = plan.input_ids.numel()
            return self.in_place(("chain", size), inputs, size)

        def one_pass(plan: StepPlan, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, *made = self._compute(plan, values.unsqueeze(0))
            likely = likeliest(made[0] if made else logits(hidden), 1, 1.0 / temperature)[..., 0]
            return likely, reads(likely[0].long(), hidden)

        return run_planned(self._backend, packed, lengths, first, one_pass)

    def _compute(self, plan: StepPlan, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.head(inputs, plan.position_ids, partial(self._backend.forward, plan))
        hidden = outputs[:, plan.logits_to_keep].flatten(0, 1)
        logits = self.head.own_logits(hidden)
        return (hidden,) if logits is None else (hidden, logits)

    def _outputs(self, packed: PackedInputs, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plan = self._backend.plan(packed)
        size = plan.input_ids.numel()
        inputs = fed(plan, inputs) if plan.replay is None else self.in_place(size, inputs, size)
        inputs = inputs.view(*plan.input_ids.shape, -1)
        outputs: tuple[torch.Tensor, ...]
        if self._compiled is not None:
            step, attend = self._backend.native_step(plan), partial(self._backend.forward, plan)
            outputs = self._compiled(inputs, plan.position_ids, attend, plan.logits_to_keep, step)
        elif plan.replay is None:
            outputs = self._compute(plan, inputs)
        else:
            outputs = plan.replay(lambda: self._compute(plan, inputs))
        index = plan.logit_index
        return outputs if index is None else tuple(output[index] for output in outputs)
