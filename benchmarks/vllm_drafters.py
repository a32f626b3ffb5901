"""Drafters inside vLLM, emssd's and its own, beside none: tokens per second, acceptance, and whether texts are equal.

    python benchmarks/vllm_drafters.py MODEL PROMPTS.jsonl emssd.integrations.vllm.suffix ngram suffix eagle3=HEAD

for a Python that has vLLM and emssd, such as that of ``nox -s vllm``. Each line of the prompts has ``prompt``, a list
of token ids. A drafter is a method of vLLM, a class that it can import, ``ngram=1-3`` for n-grams of these lengths, or
``eagle3=PATH``. Each runs in a process of its own. A turn is one round of it and one without drafts, in a second
process, and a ratio is that of a turn. vLLM's ``suffix`` needs ``arctic-inference``; what it remembers of earlier
requests is turned off, since rounds repeat the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

OWN = {
    "ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 2},
    "suffix": {"suffix_decoding_max_cached_requests": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--limit", type=int, default=100, help="prompts, the first of the file")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new", type=int, default=96, help="tokens generated at most")
    parser.add_argument("--drafted", type=int, default=8, help="tokens drafted at most, per row and step")
    parser.add_argument("--turns", type=int, default=3, help="timed ones, after one that is not")
    parser.add_argument("--out", type=Path, help="also write what was measured to this JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
            os.dup2(2, 1)  # vLLM logs to stdout
            serve_rounds(given, answers)
        return
    print("| drafter | times as fast | drafted | accepted | accepted by position, of all drafts | same texts |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    rows = []
    with Child("none", given) as none:
        plain = none.round()
        for drafter in given.drafters:
            with Child(drafter, given) as child:
                rows.append({"drafter": drafter, **turns(none, child, plain["texts"], given.turns)})
            print(line_of(rows[-1]), flush=True)
    if given.out:
        setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
        found = {"setting": setting, "python": platform.python_version(), "load": os.getloadavg(), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def turns(none: Child, child: Child, texts: list[list[int]], count: int) -> dict[str, Any]:
    """What `count` turns give; the first round of `child` is not timed."""
    child.round()
    pairs = [(none.round(), child.round()) for _ in range(count)]
    last = pairs[-1][1]
    return {
        "seconds": [(before["seconds"], after["seconds"]) for before, after in pairs],
        "ratio": statistics.median(before["seconds"] / after["seconds"] for before, after in pairs),
        "same": sum(map(list.__eq__, last.pop("texts"), texts)),
        "of": len(texts),
        **{name: last[name] for name in ("drafts", "drafted", "accepted", "by_position")},
    }


def line_of(row: dict[str, Any]) -> str:
    """A line of the table."""
    ratios = [before / after for before, after in row["seconds"]]
    rates = " ".join(f"{100 * accepted / row['drafts']:.1f}" for accepted in row["by_position"])
    share = f"{row['accepted']} ({100 * row['accepted'] / row['drafted']:.1f} %)"
    speed = f"{row['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"| {row['drafter']} | {speed} | {row['drafted']} | {share} | {rates} | {row['same']} of {row['of']} |"


class Child:
    """A process that holds a model in vLLM with one drafter, and decodes all prompts once whenever it is asked."""

    def __init__(self, drafter: str, given: argparse.Namespace) -> None:
        sizes = {"--limit": given.limit, "--batch-size": given.batch_size, "--new": given.new}
        options = [f"{name}={value}" for name, value in (sizes | {"--drafted": given.drafted}).items()]
        command = [sys.executable, __file__, given.model, str(given.prompts), drafter, *options, "--child"]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}  # vLLM's n-grams set their own, the others do not
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | threads
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def round(self) -> dict[str, Any]:
        """Seconds and texts of a round, and vLLM's counters of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self._process.args} has ended; what it says is above")
        found: dict[str, Any] = json.loads(answer)
        return found


def serve_rounds(given: argparse.Namespace, answers: IO[str]) -> None:
    """In a child: a round for each line of stdin, and what it gave as a line of `answers`."""
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
        speculative_config=speculation(given.drafters[0], given.drafted),
    )
    sampling = SamplingParams(temperature=0, max_tokens=given.new, detokenize=False)
    before = counters(engine)
    for _ in sys.stdin:
        start = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [list(row.outputs[0].token_ids) for row in done]
        after = counters(engine)
        print(json.dumps({"seconds": seconds, "texts": texts, **gained(before, after)}), file=answers, flush=True)
        before = after


def counters(engine: Any) -> dict[str, Any]:
    """Those of vLLM, since it started."""
    return {each.name: getattr(each, "values", getattr(each, "value", 0)) for each in engine.get_metrics()}


def gained(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was drafted and accepted between two looks at the counters."""

    def of(name: str) -> Any:
        now, then = (each.get(f"vllm:spec_decode_num_{name}", 0) for each in (after, before))
        return [new - old for new, old in zip(now, then, strict=True)] if isinstance(now, list) else now - then

    names = {"drafts": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
    return {ours: of(theirs) for ours, theirs in (names | {"by_position": "accepted_tokens_per_pos"}).items()}


def speculation(drafter: str, drafted: int) -> dict[str, Any] | None:
    """The ``speculative_config``."""
    if drafter == "none":
        return None
    method, _, given = drafter.partition("=")
    if method == "ngram" and given:
        least, _, most = given.partition("-")
        return {
            "method": method,
            "num_speculative_tokens": drafted,
            "prompt_lookup_min": int(least),
            "prompt_lookup_max": int(most),
        }
    if given:
        return {"method": method, "model": given, "num_speculative_tokens": drafted}
    if "." in drafter:
        return {"method": "custom_class", "model": drafter, "num_speculative_tokens": drafted}
    return {"method": drafter, "num_speculative_tokens": drafted, **OWN.get(drafter, {})}


if __name__ == "__main__":
    main()
