"""The `AttentionBackend` interface: who owns the KV cache and computes attention for one ragged step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from emssd.attention.packed import PackedInputs

__all__ = [
    "AttentionBackend",
    "KVCacheSpec",
    "KVUsage",
    "Kept",
    "LayerSpec",
    "StepPlan",
]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and rules of one attention layer, as the model itself passed them.

    Attributes:
        num_qo_heads, num_kv_heads: query heads; key and value heads (fewer for grouped queries).
        key_dim, value_dim: elements per head.
        scale: what ``q · k`` is multiplied by. OPT scales its queries itself and has 1.0 here.
        sliding_window: a token sees this many latest positions, itself included; ``None`` for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; ``None`` for no cap.
    """

    num_qo_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What a KV cache has to hold, and how it will be used.

    Attributes:
        layers: shape and rules of each layer.
        dtype, device: of keys and values.
        max_batch_size: rows of the largest batch.
        max_model_len: tokens of the longest sequence.
        max_tokens: tokens that all sequences together may hold at most; ``None`` leaves it to the backend.
        continuous: whether rows come and go at any step, and long prompts are computed piece by piece; else a batch
            begins and ends as a whole.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int
    max_model_len: int
    max_tokens: int | None = None
    continuous: bool = False

    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return elements * self.dtype.itemsize


@dataclass(slots=True)
class StepPlan:
    """What a backend prepared for one step; backends extend it with what their ``forward`` needs.

    Attributes:
        input_ids, position_ids: ``[b, n]`` what the model is fed: ``[1, nnz]`` ragged, ``[B, n_max]`` padded.
        logits_to_keep: ``[m]`` int64, the columns of ``n`` that the vocabulary projection is computed for.
        logit_index: ``[R]`` int64 into the flattened ``[b * m]`` projected rows, or ``None`` where the projected
            rows are the wanted ones already.
        num_padding: padding tokens among the inputs.
        replay: of a backend that records the model's forward pass (a CUDA graph): given the pass as a function of this
            plan's tensors, gives its logits ``[b * m, vocab]``, by recording it or by running an earlier recording of
            the same shapes. The tensors of such plans are the same ones in every step. ``None``: run the pass itself.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_to_keep: torch.Tensor
    logit_index: torch.Tensor | None
    num_padding: int
    replay: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of each row's KV.

    Attributes:
        request_ids: ``[B]``.
        kv_lens: ``[B]`` number of leading tokens whose KV stays.
    """

    request_ids: tuple[str, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV memory in bytes.

    Attributes:
        held: what the sequences hold now, in the backend's unit of allocation (pages, padded rows).
        peak_held: the largest `held` so far.
        peak_pool: the largest allocation so far.
        padding: slots that the latest `commit` lost to padding; 0 where KV is not padded.
    """

    held: int = 0
    peak_held: int = 0
    peak_pool: int = 0
    padding: int = 0


class AttentionBackend(ABC):
    """Owns the KV cache of one model and computes its attention, one ragged step at a time."""

    @abstractmethod
    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        """Reasons, in words, why this backend cannot serve `spec`; empty means that it can."""

    @abstractmethod
    def allocate(self, spec: KVCacheSpec) -> None:
        """Prepare an empty cache for `spec`. Called once, before anything else."""

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        """Bytes that a token of `spec` takes in this backend's memory, more than its KV where that is padded."""
        return spec.bytes_per_token()

    @abstractmethod
    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        """Whether the cache can hold these sequences, each at this many tokens, and no others.

        A caller that asks before every `plan`, and releases what it leaves out, never runs out of memory.
        """

    @abstractmethod
    def plan(self, packed: PackedInputs) -> StepPlan:
        """Once a step: reserve room for the new tokens and prepare indices and masks.

        A request id that is new begins an empty row. Row ``i`` attends causally to its first ``kv_lens[i]``
        tokens, the new ones being the last of them. Padding among the inputs may carry any valid id and position.

        A step may fail after this call, and the same or other rows be planned next, without a commit between: whatever
        a row holds behind the tokens that its new ones follow, ``kv_lens[i]`` less its new ones, never happened.
        """

    @abstractmethod
    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Once a layer: store the new keys and values, then attend.

        Keys and values that a query does not see change nothing of its result, even if they are NaN or infinite: those
        of other rows, of later tokens of its own row, and whatever is left of tokens rejected or rows released.

        Args:
            plan: of this step.
            layer: index into ``spec.layers``.
            query: ``[b * n, num_qo_heads, key_dim]``, tokens in the order of ``plan.input_ids``.
            key: ``[b * n, num_kv_heads, key_dim]``.
            value: ``[b * n, num_kv_heads, value_dim]``.

        Returns:
            ``[b * n, num_qo_heads, value_dim]``; rows of padding tokens hold anything finite, if the inputs are.
        """

    @abstractmethod
    def commit(self, kept: Kept) -> int:
        """After verification, drop the KV of rejected tokens.

        Returns:
            KV slots newly lost to padding by the last step: holes in rows that were shorter than the batch's longest,
            at prefill also those of shorter prompts. 0 where KV is not padded.
        """

    @abstractmethod
    def release(self, request_ids: Iterable[str]) -> None:
        """Free all KV of these requests; unknown ids are no error."""

    @property
    @abstractmethod
    def kv_usage(self) -> KVUsage:
        """Memory taken now and at most."""
