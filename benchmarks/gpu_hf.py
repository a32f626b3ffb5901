"""Decoding by Hugging Face ``generate``, the peer of the GPU benchmark."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_measure import prompts, synchronize
from gpu_models import continuation

from emssd.model import TargetModel

__all__ = ["hf_decode"]

_WARM_UPS = {"dynamic": 1, "static": 3}  # a compiled one compiles, then records graphs, then replays them


def hf_decode(
    target: TargetModel, cache: str, batch: int, context: int, new: int, *, compile_anywhere: bool = False
) -> dict[str, Any]:
    """Tokens/s of ``generate`` with a ``dynamic`` or ``static`` cache; the latter Transformers compiles, on CUDA.

    One static cache is held for all calls, as a new one would be compiled or recorded anew. What was compiled inside
    the timed call is counted, so that a result says if it is not fair.

    Args:
        compile_anywhere: compile without a GPU as well.
    """
    from transformers import CompileConfig, StaticCache

    torch.compiler.reset()  # else the second batch size would be compiled for any size, which is slower
    vars(target.model).pop("_compiled_call", None)
    ids = torch.tensor(prompts(batch, context, target.vocab_size), device=target.device)
    held = StaticCache(config=target.model.config, max_cache_len=context + new) if cache == "static" else None
    options: dict[str, Any] = {}
    if held is not None:
        options["past_key_values"] = held
    if compile_anywhere:
        options["compile_config"] = config = CompileConfig()
        config._compile_all_devices = True

    @torch.inference_mode()  # also for the reset, as the tensors of the cache are made inside
    def generate(count: int) -> tuple[float, torch.Tensor]:
        if held is not None:
            held.reset()
        synchronize(target.device)
        start = time.perf_counter()
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            **options,
        )  # fmt: skip
        synchronize(target.device)
        return time.perf_counter() - start, out[:, context:]

    begin = _compiled()
    for _ in range(_WARM_UPS[cache]):
        generate(new)
    generate(1)
    warm = _compiled()
    seconds, out = generate(new)
    prefill, _ = generate(1)
    expected = [continuation(text, new, target.vocab_size) for text in ids.tolist()]
    return {
        "tokens_per_second": batch * (new - 1) / (seconds - prefill),
        "end_to_end": batch * new / seconds,
        "equal_rows": sum(row == right for row, right in zip(out.tolist(), expected, strict=True)),
        "compiled": warm["graphs"] - begin["graphs"],
        "compiled_while_timed": _compiled()["graphs"] - warm["graphs"],
        "graphs_not_recorded": _compiled()["skips"] - begin["skips"],
    }


def _compiled() -> dict[str, int]:
    """How many graphs this process has compiled, and how many times it could not record one as a CUDA graph."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "skips": counters["inductor"]["cudagraph_skips"]}
