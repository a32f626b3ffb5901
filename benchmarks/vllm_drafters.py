"""Drafters inside vLLM, emssd's and its own, beside none: tokens per second, acceptance, and whether texts are equal.

    python benchmarks/vllm_drafters.py MODEL PROMPTS.jsonl emssd.integrations.vllm.suffix ngram suffix eagle3=HEAD

for a Python that has vLLM and emssd, such as that of ``nox -s vllm``. Each line of the prompts has ``prompt``, a list
of token ids. A drafter is a method of vLLM, a class that it can import, or ``eagle3=PATH``; each runs in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NGRAM = {"prompt_lookup_max": 2, "prompt_lookup_min": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--limit", type=int, default=100, help="prompts, the first of the file")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new", type=int, default=96, help="tokens generated at most")
    parser.add_argument("--drafted", type=int, default=8, help="tokens drafted at most, per row and step")
    parser.add_argument("--rounds", type=int, default=3, help="timed ones, after one that is not")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given, given.drafters[0])))
        return
    plain = child("none")
    print("| drafter | tokens/s, of none | drafted | accepted | accepted by position, of all drafts | same texts |")
    print("| --- | --- | --- | --- | --- | --- |")
    for drafter in given.drafters:
        found = child(drafter)
        ratio = statistics.median(plain["seconds"]) / statistics.median(found["seconds"])
        rates = " ".join(f"{100 * accepted / found['drafts']:.1f}" for accepted in found["by_position"])
        same = sum(map(list.__eq__, found["texts"], plain["texts"]))
        share = f"{found['accepted']} ({100 * found['accepted'] / found['drafted']:.1f} %)"
        print(f"| {drafter} | {ratio:.2f} | {found['drafted']} | {share} | {rates} | {same} of {len(plain['texts'])} |")


def child(drafter: str) -> dict[str, Any]:
    """What a process of its own measures of one drafter, with the options of this one."""
    options = [word for word in sys.argv[3:] if word.startswith("--") or word.isdigit()]
    command = [sys.executable, __file__, *sys.argv[1:3], drafter, *options, "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(given: argparse.Namespace, drafter: str) -> dict[str, Any]:
    """Texts, seconds of each round, and vLLM's counters of one of them."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    with given.prompts.open(encoding="utf-8") as lines:
        prompts = [{"prompt_token_ids": json.loads(line)["prompt"]} for line in lines][: given.limit]
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    engine = LLM(
        given.model,
        dtype="float32",
        max_num_seqs=given.batch_size,
        max_model_len=longest + given.new + given.drafted + 1,  # vLLM drafts for no row of a batch with a full one
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=True,
        speculative_config=speculation(drafter, given.drafted),
    )
    sampling = SamplingParams(temperature=0, max_tokens=given.new, detokenize=False)
    seconds, texts, before, after = [], [], {}, {}
    for _ in range(1 + given.rounds):
        before, start = after, time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        texts = [list(row.outputs[0].token_ids) for row in done]
        after = {each.name: getattr(each, "values", getattr(each, "value", 0)) for each in engine.get_metrics()}

    def counted(name: str) -> Any:
        now, then = (counters.get(f"vllm:spec_decode_num_{name}", 0) for counters in (after, before))
        return (
            [new - old for new, old in zip(now, then or [0] * len(now), strict=True)]
            if isinstance(now, list)
            else now - then
        )

    return {
        "texts": texts,
        "seconds": seconds[1:],
        "drafts": counted("drafts"),
        "drafted": counted("draft_tokens"),
        "accepted": counted("accepted_tokens"),
        "by_position": counted("accepted_tokens_per_pos"),
    }


def speculation(drafter: str, drafted: int) -> dict[str, Any] | None:
    """The ``speculative_config``."""
    if drafter == "none":
        return None
    method, _, path = drafter.partition("=")
    if path:
        return {"method": method, "model": path, "num_speculative_tokens": drafted}
    if "." in drafter:
        return {"method": "custom_class", "model": drafter, "num_speculative_tokens": drafted}
    own = NGRAM if drafter == "ngram" else {}
    return {"method": drafter, "num_speculative_tokens": drafted, **own}


if __name__ == "__main__":
    main()
