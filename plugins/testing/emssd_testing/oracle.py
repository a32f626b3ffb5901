"""Oracles, right by definition: greedy decoding that recomputes everything, and attention written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, PackedInputs, StepPlan
from emssd.sequences import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model import TargetModel

__all__ = ["DenseBackend", "References", "greedy_reference", "next_logits", "seen"]


@torch.inference_mode()
def next_logits(model: Any, tokens: Seq[int], attention: str = "eager") -> torch.Tensor:
    """``[vocab]``: what a causal LM says after exactly these tokens, by an attention of its own, without a cache."""
    before = model.config._attn_implementation
    model.config._attn_implementation = attention
    try:
        inputs = torch.tensor([list(tokens)], device=model.device)
        logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits[0, -1]
    finally:
        model.config._attn_implementation = before
    return logits


def greedy_reference(
    model: PreTrainedModel, prompt_ids: Seq[int], max_new_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[int]:
    """Greedy decoding of one prompt: the whole sequence again for each token, by the model's own eager attention.

    Nothing of emssd is used. Of equal logits the lowest token id wins. Meant for float64, where another order of
    sums does not make another logit the largest.

    Args:
        model: any causal LM; left as it was.
        prompt_ids: one prompt. It and its new tokens must fit into the model.
    """
    eos, output = frozenset(eos_token_ids), list[int]()
    while len(output) < max_new_tokens and not (output and output[-1] in eos):
        output.append(int(torch.argmax(next_logits(model, [*prompt_ids, *output]))))
    return output


class References(dict[Any, tuple[int, ...]]):
    """The texts of `greedy_reference`, past any EOS, by prompt; computed when first asked for."""

    def __init__(self, target: TargetModel, max_new_tokens: int) -> None:
        self.target, self.max_new_tokens = target, max_new_tokens

    def __missing__(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        room = min(self.max_new_tokens, self.target.max_model_len - len(prompt_ids))
        self[prompt_ids] = tuple(greedy_reference(self.target.model, prompt_ids, room))
        return self[prompt_ids]

    def get(self, key: Any, default: Any = None) -> Any:
        """Of a tuple of token ids, always a text."""
        return self[key] if isinstance(key, tuple) else default

    def __bool__(self) -> bool:
        return True  # there is an answer to every prompt

    def of(self, request: Request) -> tuple[int, ...]:
        """The tokens that `request` must get."""
        tokens = self[request.prompt_ids][: request.max_new_tokens]
        ends = (count for count, token in enumerate(tokens, start=1) if token in request.eos_token_ids)
        return tokens[: next(ends, len(tokens))]


class DenseBackend(AttentionBackend):
    """The dense reference: each sequence's keys and values one after another, one query at a time, in float64.

    It shares no arithmetic with `emssd.attention.masked_attention`, and it asserts what a caller owes to a backend:
    that the new tokens follow the cached ones without a gap, and that a commit keeps no more than there is. Tokens
    that a row holds after its cached ones are of a step that never happened.
    """

    takes_trees = True
    takes_sinks = True

    def __init__(self) -> None:
        self._keys: dict[str, list[torch.Tensor]] = {}
        self._values: dict[str, list[torch.Tensor]] = {}
        self._lengths: dict[str, int] = {}
        self._peak = 0

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return []

    def allocate(self, spec: KVCacheSpec) -> None:
        self._spec = spec

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        self._spec = replace(self._spec, layers=tuple(layers))
        return True

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._spec.max_tokens is None or sum(kv_lens.values()) <= self._spec.max_tokens

    def plan(self, packed: PackedInputs) -> StepPlan:
        assert len(set(packed.request_ids)) == packed.num_rows <= self._spec.max_batch_size
        positions = packed.position_ids.tolist()
        for row, (request_id, kv_len, new) in enumerate(
            zip(packed.request_ids, packed.kv_lens, _rows(packed), strict=True)
        ):
            if request_id not in self._lengths:
                layers = self._spec.layers
                self._keys[request_id] = [self._empty(layer.num_kv_heads, layer.key_dim) for layer in layers]
                self._values[request_id] = [self._empty(layer.num_kv_heads, layer.value_dim) for layer in layers]
            num_cached = kv_len - (new.stop - new.start)
            assert 0 <= num_cached <= self._lengths.get(request_id, 0), (request_id, num_cached)
            expected = packed.kv_positions(row)[num_cached:]
            assert max(expected) < self._spec.max_model_len, request_id
            self._cut(request_id, num_cached)
            assert positions[new] == expected, request_id
            self._lengths[request_id] = kv_len
        self._peak = max(self._peak, self.kv_usage.held)
        return StepPlan.ragged(packed.on(self._spec.device), packed)

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        packed: PackedInputs = plan.attention
        spec = self._spec.layers[layer]
        out = query.new_empty(packed.num_tokens, spec.num_qo_heads, spec.value_dim)
        for row, (request_id, kv_len, new) in enumerate(
            zip(packed.request_ids, packed.kv_lens, _rows(packed), strict=True)
        ):
            keys = torch.cat([self._keys[request_id][layer], key[new].double()])
            values = torch.cat([self._values[request_id][layer], value[new].double()])
            assert len(keys) == len(values) == kv_len, f"layer {layer} of {request_id} missed a step"
            self._keys[request_id][layer], self._values[request_id][layer] = keys, values
            for token in range(new.start, new.stop):
                visible = seen(packed, row, kv_len - (new.stop - token))
                if spec.sliding_window is not None:
                    visible = visible[-spec.sliding_window :]
                out[token] = _attend(query[token].double(), keys[visible], values[visible], spec).to(out.dtype)
        return out

    def commit(self, kept: Kept) -> None:
        for request_id, before, after in kept.moves():
            assert before[-1] < self._lengths[request_id], f"{request_id} moves more than it has"
            for stored in (*self._keys[request_id], *self._values[request_id]):
                stored[list(after)] = stored[list(before)]
        for request_id, kv_len in zip(kept.request_ids, kept.kv_lens, strict=True):
            assert 0 <= kv_len <= self._lengths[request_id], f"{request_id} keeps more than it has"
            self._lengths[request_id] = kv_len
            self._cut(request_id, kv_len)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for held in (self._lengths, self._keys, self._values):
                held.pop(request_id, None)

    @property
    def kv_usage(self) -> KVUsage:
        return KVUsage(sum(self._lengths.values()) * self._spec.bytes_per_token(), self._peak, self._peak)

    def _cut(self, request_id: str, kv_len: int) -> None:
        for stored in (self._keys[request_id], self._values[request_id]):
            stored[:] = [tensor[:kv_len] for tensor in stored]

    def _empty(self, num_heads: int, dim: int) -> torch.Tensor:
        return torch.empty(0, num_heads, dim, dtype=torch.float64, device=self._spec.device)


def _rows(packed: PackedInputs) -> list[slice]:
    return [slice(start, stop) for start, stop in zip(packed.qo_indptr, packed.qo_indptr[1:], strict=False)]


def seen(packed: PackedInputs, row: int, token: int) -> list[int]:
    """The KV that a token of a row sees, by index, from the first to itself: of a tree, the path to it."""
    tree = () if packed.trees is None else packed.trees[row]
    origin, path = packed.kv_lens[row] - len(tree), list[int]()
    while token >= origin:
        path.append(token)
        parent = tree[token - origin]
        token = origin + parent if parent >= 0 else origin - 1
    return [*range(token + 1), *reversed(path)]


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """One query ``[heads, key_dim]`` over all of ``keys [m, kv_heads, key_dim]``, head by head."""
    heads = []
    for head in range(layer.num_qo_heads):
        shared = head * layer.num_kv_heads // layer.num_qo_heads
        scores = (keys[:, shared] * query[head]).sum(dim=1) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * (scores / layer.softcap).tanh()
        sinks = scores.new_tensor([] if layer.sinks is None else layer.sinks[head : head + 1])
        most = torch.cat([scores, sinks]).max()
        weights = (scores - most).exp()
        heads.append((weights[:, None] * values[:, shared]).sum(dim=0) / (weights.sum() + (sinks - most).exp().sum()))
    return torch.stack(heads)
