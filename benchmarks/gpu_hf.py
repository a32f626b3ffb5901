"""Decoding by Hugging Face ``generate``, the peer of the GPU benchmark."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_measure import prompts, right_rows, synchronize

from emssd.model import TargetModel

__all__ = ["hf_decode"]

_WARM_UPS = {"dynamic": 1, "static": 3}  # a compiled one compiles, then records graphs, then replays them


def hf_decode(target: TargetModel, cache: str, batch: int, context: int, new: int) -> dict[str, Any]:
    """Tokens/s of ``generate`` with a ``dynamic`` or ``static`` cache; the latter Transformers compiles, on CUDA.

    One static cache is held for all calls, as a new one would be compiled or recorded anew. The faster of two timed
    calls counts. How long both took and what was compiled inside of them is in the result, which so says if it is fair.
    """
    from transformers import StaticCache

    torch.compiler.reset()  # else the second batch size would be compiled for any size, which is slower
    vars(target.model).pop("_compiled_call", None)
    ids = torch.tensor(prompts(batch, context, target.vocab_size), device=target.device)
    held = StaticCache(config=target.model.config, max_cache_len=context + new) if cache == "static" else None
    options = {} if held is None else {"past_key_values": held}

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
    timed = [generate(new), generate(new)]
    seconds, out = min(timed, key=lambda run: run[0])
    prefill, _ = generate(1)
    return {
        "tokens_per_second": batch * (new - 1) / (seconds - prefill),
        "end_to_end": batch * new / seconds,
        "equal_rows": right_rows(out.tolist(), ids.tolist(), target.vocab_size),
        "timed_seconds": [run[0] for run in timed],
        "compiled": warm["graphs"] - begin["graphs"],
        "compiled_while_timed": _compiled()["graphs"] - warm["graphs"],
        "graphs_not_recorded": _compiled()["skips"] - begin["skips"],
    }


def _compiled() -> dict[str, int]:
    """The numbers of graphs that this process has compiled, and of those that it could not record as a CUDA graph."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "skips": counters["inductor"]["cudagraph_skips"]}
