"""Decoding by a loop in plain PyTorch, the peer that bounds what a compiled and recorded pass can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from emssd_flashinfer.recorded import CudaGraphCapture
from gpu_measure import median_seconds, prompts, right_rows
from torch.nn.functional import scaled_dot_product_attention

from emssd.model import TargetModel

__all__ = ["loop_decode"]


@torch.inference_mode()
def loop_decode(target: TargetModel, tokens: int, batch: int, context: int, new: int) -> dict[str, Any]:
    """Tokens/s of a loop that launches one CUDA graph a step: Inductor's pass, and the copy of its greedy tokens.

    A step computes `tokens` per row: the newest, and drafts that are wrong. So it adds one token.
    """
    from transformers import AttentionInterface

    torch.compiler.reset()
    model, slots = target.model, torch.arange((context + new + tokens + 7) // 8 * 8, device=target.device)
    reads, positions = {"positions": slots[:context]}, slots[context : context + tokens].clone()
    AttentionInterface.register("loop", _static_attention(slots, reads))
    before, model.config._attn_implementation = model.config._attn_implementation, "loop"

    def best(ids: torch.Tensor) -> torch.Tensor:
        place = reads["positions"].expand(len(ids), -1)
        return model(input_ids=ids, position_ids=place, use_cache=False).logits.argmax(dim=-1)

    def step() -> None:
        ids[:, :1] = compiled(ids)[:, :1]
        positions.add_(1)
        texts.index_copy_(1, positions[:1] - context, ids[:, :1])

    def decode() -> None:
        positions.copy_(slots[context : context + tokens])
        ids[:, :1] = texts[:, :1] = first
        for _ in range(new - 1):
            run()

    try:
        asked = prompts(batch, context, target.vocab_size)
        first = best(torch.tensor(asked, device=target.device))[:, -1:]
        ids, texts = first.new_full((batch, tokens), 5), first.new_zeros(batch, new)
        reads["positions"], compiled = positions, torch.compile(best, fullgraph=True, dynamic=False)
        run = CudaGraphCapture()(step) if target.device.type == "cuda" else step
        seconds = median_seconds(decode, target.device, 3)
    finally:
        model.config._attn_implementation = before
    right = right_rows(texts.tolist(), asked, target.vocab_size)
    return {"tokens_per_second": batch * (new - 1) / seconds, "equal_rows": right}


def _static_attention(slots: torch.Tensor, reads: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Attention as Transformers calls it, over keys and values of one length: those up to ``reads["positions"]``."""
    held: dict[int, list[torch.Tensor]] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float | None = None, **__: Any) -> Any:
        if module.layer_idx not in held:
            held[module.layer_idx] = [new.new_zeros(*new.shape[:2], len(slots), new.shape[3]) for new in (key, value)]
        keys, values = held[module.layer_idx]
        keys.index_copy_(2, reads["positions"], key)
        values.index_copy_(2, reads["positions"], value)
        seen = (slots <= reads["positions"][:, None]).repeat(query.shape[1] // key.shape[1], 1)
        grouped = query.reshape(len(key), key.shape[1], -1, key.shape[3])  # so that no key is repeated
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scaling)
        return out.reshape(query.shape).transpose(1, 2), None

    return attend
