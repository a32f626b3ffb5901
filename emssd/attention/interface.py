"""The `AttentionBackend` interface: who owns the KV cache and computes attention for one ragged step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from emssd.attention.packed import PackedInputs, StepInputs

__all__ = ["AttentionBackend", "KVCacheSpec", "KVUsage", "Kept", "LayerSpec", "NativeStep", "StepPlan"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and rules of one attention layer, as the model itself passed them.

    Attributes:
        num_qo_heads, num_kv_heads: query heads; key and value heads (fewer for grouped queries).
        key_dim, value_dim: elements per head.
        scale: factor of ``q · k``. OPT scales its queries itself and has 1.0 here.
        sliding_window: a token sees this many of the latest positions, its own included; ``None`` for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; ``None`` for no cap.
        sinks: ``[num_qo_heads]`` attention sinks: for each head the score of one more key that every token sees, and
            whose value is zero (Xiao et al. 2023, arXiv 2309.17453; as learnt numbers in gpt-oss). It is neither
            scaled nor capped. ``None`` for no such key.
    """

    num_qo_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The contents of a KV cache, and how it is used.

    Attributes:
        layers: shape and rules of each layer.
        dtype, device: of keys and values.
        max_batch_size: rows of the largest batch.
        max_model_len: tokens of the longest sequence.
        max_tokens: the cache may take the memory of this many tokens; ``None`` leaves it to the backend.
        continuous: whether rows come and go at any step, and long prompts are computed in pieces. Otherwise a batch
            begins and ends as a whole.
        trees: whether rows may end with token trees, see `PackedInputs.trees`.
        prefix_caching: whether sequences that begin alike share the KV of what they share, if the backend can.
        bytes_per_row: of the states that the model keeps of a row beside its KV, see `emssd.model.hf.recurrent_states`.
        devices: by layer where its KV lies, if that is not always `device`. No backend of a plugin sees this: each gets
            the layers of one device, see `emssd.attention.spread`.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int
    max_model_len: int
    max_tokens: int | None = None
    continuous: bool = False
    trees: bool = False
    prefix_caching: bool = False
    bytes_per_row: int = 0
    devices: tuple[torch.device, ...] = ()

    @property
    def has_sinks(self) -> bool:
        """Whether any layer has attention sinks."""
        return any(layer.sinks is not None for layer in self.layers)

    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return elements * self.dtype.itemsize


NativeStep = Any
"""The attention of a step, which C++ code computes without Python: ``torch.classes.emssd_native.Step`` of the kernels.

It is called with, in this order:

- ``keys``, ``values``: tensors by layer, the pool, as `emssd.attention.pool.KVPool` has it;
- ``query_indptr``, ``kv_lens``, ``page_indptr``, ``pages``: lists; row ``i`` has the queries and the pages from entry
  ``i`` of its ``indptr`` to the next;
- ``tree_indptr``, ``parents``: lists, the trees that rows end with; ``None`` if no row has any;
- ``scales``, ``windows``, ``softcaps``, ``sinks``: by layer, see `emssd.attention.LayerSpec`; 0 stands for none.

``attend(query, key, value, layer)`` is what `AttentionBackend.forward` gives. See `emssd.model.compile.program`.
"""

Replay = Callable[[Callable[[], Any]], Any]


@dataclass(slots=True)
class StepPlan:
    """The model's inputs of one step, and the backend's preparation of its attention.

    Attributes:
        input_ids, position_ids: ``[b, n]`` what the model is fed: ``[1, nnz]`` ragged, ``[B, n_max]`` padded. Tokens
            beyond the ``nnz`` packed ones are padding.
        logits_to_keep: ``[m]`` int64, the columns of ``n`` that the vocabulary projection is computed for.
        logit_index: ``[R]`` int64 into the flattened ``[b * m]`` projected rows, or the slice of them that is wanted;
            ``None`` if all of them are.
        attention: what the backend's own `forward` reads. Nobody else does.
        replay: runs the model's forward pass in the backend's way, for example from a CUDA graph. It is called with the
            pass, a function of this plan's tensors, and returns its outputs. A recording overwrites them at every
            step. ``None`` runs the pass as it is.
        token_index: ``[nnz]`` int64, where each packed token is in the flattened ``[b * n]`` fed ones; ``None`` if they
            are the first of them, in order.
        compile: ``compile(target, indices)``, a pass in fewer launches with these hidden states; ``None`` has none.
        landing: ``[b * m]`` int64, the backend's memory on the host for the likeliest token of each projected row, the
            same in all steps of a recording; or ``None``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_to_keep: torch.Tensor
    logit_index: torch.Tensor | slice | None
    attention: Any = None
    replay: Replay | None = None
    token_index: torch.Tensor | None = None
    compile: Callable[[Any, Seq[int]], Callable[..., torch.Tensor]] | None = None
    landing: torch.Tensor | None = None

    def packed(self, fed: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The values of the `num_tokens` packed tokens, ``[nnz, ...]``, out of `fed`, ``[b * n, ...]``."""
        return fed[:num_tokens] if self.token_index is None else fed[self.token_index]

    @classmethod
    def ragged(cls, inputs: StepInputs, attention: Any, replay: Replay | None = None) -> StepPlan:
        """Feed the model the tokens as they are packed, ``[1, nnz]``, without padding."""
        ids, positions = inputs.input_ids.unsqueeze(0), inputs.position_ids.unsqueeze(0)
        return cls(ids, positions, inputs.logit_rows, None, attention, replay)


class Kept(NamedTuple):
    """The part of each row's KV that stays.

    Attributes:
        request_ids: ``[B]``.
        kv_lens: ``[B]`` number of tokens whose KV stays.
        sources: ``[B]``, for each row the indices in its KV, ascending, of those tokens that stay and are to move: they
            become the last of its ``kv_lens``. Empty for a row that keeps its first tokens as they are.
    """

    request_ids: tuple[str, ...]
    kv_lens: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...] = ()

    def moves(self) -> list[tuple[str, tuple[int, ...], range]]:
        """The rows with tokens that move: request id, and their indices in the KV before and after."""
        rows = zip(self.request_ids, self.kv_lens, self.sources, strict=True) if self.sources else ()
        return [(name, sources, range(kv_len - len(sources), kv_len)) for name, kv_len, sources in rows if sources]


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV memory, in bytes.

    Attributes:
        held: what the sequences hold now, in the backend's unit of allocation (pages, padded rows).
        peak_held: the largest `held` so far.
        peak_pool: the largest allocation so far.
        padding: KV slots, not bytes, that the latest `commit` lost to padding: holes in rows that are shorter than the
            longest row of the batch. 0 if KV is not padded.
    """

    held: int = 0
    peak_held: int = 0
    peak_pool: int = 0
    padding: int = 0


class AttentionBackend(ABC):
    """Owns the KV cache of one model and computes its attention, one ragged step at a time.

    Attributes:
        takes_trees: whether `plan` takes rows that end with token trees, and `commit` moves KV.
        takes_sinks: whether it computes `LayerSpec.sinks`.
        takes_devices: whether several of it, on a device each, may serve the layers of one model. Its `StepPlan.replay`
            may then run within that of another.
        batch_invariant: whether a query has the same bits whatever other rows, drafts and steps there are.
        prefix_unit: KV is shared by so many tokens; 0 if it is not shared. Of use after `allocate`.
        recorded_sizes: the numbers of tokens of steps that are recorded, each when it first comes; ascending.
    """

    takes_trees: bool = False
    takes_sinks: bool = False
    takes_devices: bool = False
    batch_invariant: bool = False
    prefix_unit: int = 0
    recorded_sizes: tuple[int, ...] = ()

    @abstractmethod
    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        """Reasons, in words, why this backend cannot serve `spec`; empty means that it can."""

    @abstractmethod
    def allocate(self, spec: KVCacheSpec) -> None:
        """Prepare an empty cache for `spec`. Called once, before anything else."""

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        """Bytes that a token of `spec` takes in this backend's memory; padded heads take more than the KV itself."""
        return spec.bytes_per_token()

    @abstractmethod
    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        """Whether the cache can hold these sequences at these lengths, and no others.

        A caller never runs out of memory if it asks before every `plan` and releases the rows that it leaves out.
        """

    @abstractmethod
    def plan(self, packed: PackedInputs) -> StepPlan:
        """Once a step: reserve room for the new tokens and prepare indices and masks.

        A new request id begins an empty row. `PackedInputs` says what each token sees. Padding tokens may carry any
        valid id and position.

        If a step fails, the next one is planned without a commit. So a row keeps only its tokens before the new ones,
        ``kv_lens[i]`` less the number of new ones; forget all later tokens.
        """

    @abstractmethod
    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Once a layer: store the new keys and values, then attend.

        Keys and values that a query does not see do not change its result, even if they are NaN or infinite. These
        belong to other rows, to later tokens of its own row, to rejected tokens, or to released rows.

        Args:
            plan: of this step.
            layer: index into ``spec.layers``.
            query: ``[b * n, num_qo_heads, key_dim]``, tokens in the order of ``plan.input_ids``.
            key: ``[b * n, num_kv_heads, key_dim]``.
            value: ``[b * n, num_kv_heads, value_dim]``.

        Returns:
            ``[b * n, num_qo_heads, value_dim]``. Padding tokens get anything that is finite if the inputs are.
        """

    def native_step(self, plan: StepPlan) -> NativeStep | None:
        """The handle with which C++ code does the same as `forward`, in all layers; ``None`` if only `forward` can.

        A compiled program asks for it, and then calls no `forward` in this step.
        """
        return None

    def plan_chain(self, packed: PackedInputs, lengths: Seq[int]) -> list[StepPlan]:
        """Plan passes of one token for each row beforehand, each after the one before.

        Args:
            packed: the first of them.
            lengths: ``[B]`` in how many of the passes a row takes part, at least one. What it computes in later ones is
                dropped.

        Returns:
            A plan for each pass. `StepPlan.replay` of the first is for a function of all of them. Empty: this backend
            plans each pass by itself.
        """
        return []

    @abstractmethod
    def commit(self, kept: Kept) -> None:
        """After verification, move the KV of accepted tree nodes together and drop that of rejected tokens."""

    @abstractmethod
    def release(self, request_ids: Iterable[str]) -> None:
        """Free all KV of these requests. Unknown ids are no error."""

    def adopt_prefix(self, request_id: str, tokens: Seq[int], num_cached: int = 0) -> int:
        """Give a row the KV of its longest published beginning, if that is longer than what it has.

        That of the last token is never given, as its logits are wanted. A backend that shares nothing changes nothing.

        Args:
            request_id: of the row, which may be new.
            tokens: all of its tokens.
            num_cached: how many of them have their KV.

        Returns:
            How many of them have it now.
        """
        return num_cached

    def publish_prefix(self, request_id: str, tokens: Seq[int]) -> None:
        """Let other rows adopt this row's KV of its first `tokens`.

        It is in the cache and committed, and the row is not cut back into it later.
        """

    def forget_prefixes(self) -> None:
        """Nothing that was published before is adopted any more. Rows keep what they have."""

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        """Replace the attention sinks by those of `layers`, while no row holds KV. Returns whether that is possible.

        A backend that returns false does not serve the model any more.
        """
        return False

    def forget_steps(self) -> None:
        """Drop recorded passes, because the model has changed. No row holds KV."""

    @property
    @abstractmethod
    def kv_usage(self) -> KVUsage:
        """Memory that is taken now and was taken at most, and what the latest step lost to padding."""
