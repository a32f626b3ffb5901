"""Transformers' `generate_batch` alone and within `emssd.speculate`: one model, one process, by turns.

    python benchmarks/generate_batch.py --model DIR --data prompts.jsonl --rows 1 8 16

Each way has a model of its own. A first call of one token is not measured: it makes the engine and its program. A
ratio is to Transformers' own call in the same repeat; the table has the medians. Drafts must change no
row; *equal* counts the rows that Transformers alone gives, too. Its kernels round differently.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import make_parser, save, show
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import emssd


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with a field prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", nargs="+", default=["none", "suffix"])
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = getattr(torch, options.dtype)
    models: dict[str, Any] = {}
    for drafter in ("Transformers", *options.drafters):
        models[drafter] = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        if drafter != "Transformers":
            emssd.speculate(models[drafter], drafter=drafter, compile=True, frozen=True)
    config = GenerationConfig(max_new_tokens=options.max_new_tokens, do_sample=False, eos_token_id=-1)
    texts = [json.loads(line)["prompt"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    results = []
    for num_rows in options.rows:
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[:num_rows]]
        # Without a number of blocks, Transformers takes most of the machine's memory.
        batching = ContinuousBatchingConfig(num_blocks=4 * num_rows, max_batch_tokens=512)
        runs: dict[str, list[tuple[float, list[list[int]]]]] = {}
        for model in models.values():
            model.generate_batch(prompts, GenerationConfig(max_new_tokens=1, eos_token_id=-1), batching)
        for _ in range(options.repeats):
            for drafter, model in models.items():
                start = time.perf_counter()
                outputs = model.generate_batch(prompts, config, batching).values()
                seconds = time.perf_counter() - start
                runs.setdefault(drafter, []).append((seconds, [output.generated_tokens for output in outputs]))
        alone = runs["Transformers"]
        for drafter, timed in runs.items():
            ratios = [first / second for (first, _), (second, _) in zip(alone, timed, strict=True)]
            equal = sum(one == other for one, other in zip(timed[0][1], alone[0][1], strict=True))
            speed = statistics.median(sum(map(len, rows)) / seconds for seconds, rows in timed)
            line = {"rows": num_rows, "drafter": drafter, "tokens/s": round(speed, 1), "equal": f"{equal}/{num_rows}"}
            results.append(
                line | {"ratio": round(statistics.median(ratios), 2), "ratios": [round(r, 2) for r in ratios]}
            )
        assert len({str(timed[0][1]) for drafter, timed in runs.items() if drafter != "Transformers"}) == 1
    save(options.out, results, dtype=dtype)
    show("generate_batch", results[0], [line.values() for line in results])
    return results


if __name__ == "__main__":
    main()
