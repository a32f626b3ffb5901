"""`HeadRunner`: a trained head with a KV cache of its own, run on ragged steps as a model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, PackedInputs
from emssd.heads.compiled import compiled_head
from emssd.heads.layers import Attend
from emssd.model.program import Chain

__all__ = ["Head", "HeadRunner"]


class Head(nn.Module, ABC):
    """Decoder layers that read one vector for each token, and no token ids.

    Attributes:
        input_size: elements of that vector.
        max_len: the longest sequence; ``None`` for any.
    """

    input_size: int
    max_len: int | None

    @property
    @abstractmethod
    def specs(self) -> tuple[LayerSpec, ...]:
        """Shape and rules of each attention layer."""

    @abstractmethod
    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states ``[b, n, hidden_size]`` of ``inputs [b, n, input_size]`` at ``position_ids [b, n]``."""

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, draft_vocab_size]`` behind hidden states ``[n, hidden_size]`` that `forward` gave.

        ``None`` where they need the target's vocabulary projection.
        """
        return None

    def kv_cache_spec(self, target: KVCacheSpec) -> KVCacheSpec:
        """The KV cache that the head needs beside that of the target."""
        longest = target.max_model_len if self.max_len is None else min(target.max_model_len, self.max_len)
        return replace(target, layers=self.specs, max_model_len=longest, prefix_caching=False)


class HeadRunner:
    """A head on one device, with its KV in an attention backend. Rows, trees and rollback are those of any model.

    Args:
        head: with its weights.
        backend: allocated for the head's `kv_cache_spec`.
        compile: run it as a compiled program, see `emssd.heads.compiled`, where that can be.
    """

    def __init__(self, head: Head, backend: AttentionBackend, *, compile: bool = False) -> None:
        self.head, self._backend = head, backend
        self._compiled = compiled_head(head) if compile else None

    def run(self, packed: PackedInputs, inputs: torch.Tensor) -> torch.Tensor:
        """Compute one ragged step. The KV of its tokens stays until `commit` or `release` drops it.

        Args:
            packed: who computes what; its token ids are not read.
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
        self, packed: PackedInputs, inputs: torch.Tensor, chain: Chain
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute a step of chains, and then the head's likeliest tokens, level by level, in one call.

        Args:
            packed, inputs: as in `run`; outputs are wanted of the last token of each row.
            chain: what is asked for, see `emssd.model.program.Program.run_chain`.

        Returns:
            ``[B, k]`` tokens and the logarithms of how likely they are. ``None``: `run_to_logits` does one level.
        """
        if self._compiled is None:
            return None
        numbered = replace(packed, input_ids=torch.arange(packed.num_tokens), drafted=None)
        plan = self._backend.plan_chain(numbered, [length - 1 for length in chain.lengths])
        step = None if plan is None else self._backend.native_step(plan)
        if plan is None or step is None:
            return None
        return self._compiled.run_chain(inputs.unsqueeze(0), plan, step, chain)

    def _outputs(self, packed: PackedInputs, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Token ids are numbers to a backend. So the ids of this step say which input a place of the plan is for.
        plan = self._backend.plan(replace(packed, input_ids=torch.arange(packed.num_tokens), drafted=None))

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._backend.forward(plan, layer, query, key, value)

        outputs: tuple[torch.Tensor, ...]
        if self._compiled is not None:
            fed, step = inputs[plan.input_ids], self._backend.native_step(plan)
            outputs = self._compiled(fed, plan.position_ids, attend, plan.logits_to_keep, step)
        else:
            hidden = self.head(inputs[plan.input_ids], plan.position_ids, attend)
            outputs = (hidden[:, plan.logits_to_keep].flatten(0, 1),)
        index = plan.logit_index
        return outputs if index is None else tuple(each[index] for each in outputs)

    def commit(self, kept: Kept) -> None:
        """After verification, drop the KV of rejected tokens."""
        self._backend.commit(kept)

    def release(self, request_ids: Iterable[str]) -> None:
        """Free all KV of these requests. Unknown ids are no error."""
        self._backend.release(request_ids)

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        """Whether the cache can hold these sequences, each at this many tokens, and no others."""
        return self._backend.fits(kv_lens)

    @property
    def usage(self) -> KVUsage:
        """KV memory taken now and at most."""
        return self._backend.kv_usage
