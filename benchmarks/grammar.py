"""Tokens per second of JSON output, with and without drafts and forced tokens, at 1 and 8 rows.

    python benchmarks/grammar.py MODEL [--compile] [--num-new 64] [--rows 1 8]

All texts are compared with those of decoding without drafts. τ is tokens per step and row. `masks` is the time inside
mask computations, on the thread beside the model, and `wait` all that steps take longer for a grammar: for masks that
are not there yet, for states, for forced tokens, and for putting masks over logits. Both are shares of the steps' time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from emssd.decoding import choosing, engine
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.drafting import stages
from emssd.drafting.stages import ForcedTokens
from emssd.model import ModelOptions, load_model
from emssd.sampling import SamplingParams, choice, matching
from emssd.sequences import Row

FIELDS = {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer", "minimum": 0, "maximum": 999}}
FIELDS |= {"sold": {"type": "boolean"}}
ITEM = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 4, "maxItems": 4, "x-guidance": {"whitespace_flexible": False}}
MODES = (("no drafts", "none", False), ("suffix", "suffix", False), ("forced tokens", "none", True))
MODES += (("forced tokens, suffix", "suffix", True),)
SECONDS, WITHIN = Counter[str](), set[str]()


def timed(owner: Any, name: str, kind: str) -> None:
    """Count the seconds inside a function, but not within another of its kind, in this process."""
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*given: Any, **more: Any) -> Any:
        if kind in WITHIN:
            return inner(*given, **more)
        WITHIN.add(kind)
        start = time.perf_counter()
        try:
            return inner(*given, **more)
        finally:
            SECONDS[kind] += time.perf_counter() - start
            WITHIN.remove(kind)

    setattr(owner, name, outer)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-new", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    timed(matching._Matcher, "mask", "masks")
    for owner, name in ((engine, "states_in"), (choosing, "_states_of"), (stages, "_allowed"), (choice, "masked")):
        timed(owner, name, "wait")
    timed(ForcedTokens, "propose", "wait")
    timed(Row, "_append", "wait")
    target, tokenizer = load_model(ModelOptions(options.model, compile=options.compile))
    sampling = SamplingParams(temperature=1.0, grammar=SCHEMA)
    print(
        "| rows | drafts | tokens/s | × no drafts | τ | masks, % | wait, % | equal rows |\n"
        "| - | - | - | - | - | - | - | - |"
    )
    for rows in options.rows:
        texts, plain = list[tuple[int, ...]](), 0.0
        for label, drafter, forces in MODES:
            chosen = EngineOptions(batch_size=rows, force_tokens=forces)
            made = Engine.assemble(target, tokenizer, drafter=drafter, backend="ragged", options=chosen)
            prompts = [f"Item {row} of the list, as JSON: " for row in range(rows)]
            made.generate(prompts, 16, sampling=sampling)
            SECONDS.clear()
            done = made.generate(prompts, options.num_new, sampling=sampling)
            seconds, found = sum(made.report.seconds.values()), [each.token_ids for each in done]
            texts = texts or found
            speed = sum(map(len, found)) / seconds
            plain = plain or speed
            num_equal = sum(a == b for a, b in zip(texts, found, strict=True))
            tau = 1 + made.report.num_accepted / made.report.num_row_steps
            masks, wait = SECONDS["masks"] / seconds, (SECONDS["wait"] + made.report.seconds["mask"]) / seconds
            print(
                f"| {rows} | {label} | {speed:.1f} | {speed / plain:.2f} | {tau:.2f} | {masks:.2%} | {wait:.2%} "
                f"| {num_equal}/{rows} |".replace("%", ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
