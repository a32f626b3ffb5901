"""Tokens per second of JSON output, with and without drafts and forced tokens, at 1 and 8 rows.

    python benchmarks/grammar.py MODEL [--num-new 64] [--rows 1 8]

All texts are compared with those of decoding without drafts. `mask` is the time inside the mask computations, on the
thread beside the model, as a share of the steps.
"""

from __future__ import annotations

import argparse
import time

from emssd.decoding.engine import Engine
from emssd.sampling import SamplingParams
from emssd.sampling.matching import MatcherState

FIELDS = {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer", "minimum": 0, "maximum": 999}}
FIELDS |= {"sold": {"type": "boolean"}}
ITEM = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 4, "maxItems": 4, "x-guidance": {"whitespace_flexible": False}}
MODES = (("no drafts", "none", False), ("forced", "none", True), ("suffix", "suffix", False))
MODES += (("forced, suffix", "suffix", True),)


class TimedMask:
    """Counts the seconds inside `MatcherState.mask`."""

    def __init__(self) -> None:
        self.seconds, self._inner = 0.0, MatcherState.mask.fget

    def __get__(self, state: MatcherState, _: type) -> object:
        if state._mask is not None:
            return state._mask
        start = time.perf_counter()
        found = self._inner(state)
        self.seconds += time.perf_counter() - start
        return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-new", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    timed = MatcherState.mask = TimedMask()  # type: ignore[misc,assignment]  # for this process
    sampling = SamplingParams(temperature=1.0, grammar=SCHEMA)
    print(
        "| rows | drafts | tokens/s | × no drafts | τ | mask, % of steps | equal rows |\n| - | - | - | - | - | - | - |"
    )
    for rows in options.rows:
        texts, plain = {}, 0.0
        for label, drafter, forces in MODES:
            engine = Engine.from_pretrained(options.model, drafter=drafter, batch_size=rows)
            engine.drafting.forces = forces
            prompts = [f"Item {row} of the list, as JSON: " for row in range(rows)]
            engine.generate(prompts, 16, sampling=sampling)
            timed.seconds = 0.0
            done = engine.generate(prompts, options.num_new, sampling=sampling)
            seconds, found = sum(engine.report.seconds.values()), [each.token_ids for each in done]
            texts.setdefault(rows, found)
            speed = sum(map(len, found)) / seconds
            plain = plain or speed
            num_equal = sum(a == b for a, b in zip(texts[rows], found, strict=True))
            tau = 1 + engine.report.num_accepted / engine.report.num_row_steps
            print(
                f"| {rows} | {label} | {speed:.1f} | {speed / plain:.2f} | {tau:.2f} "
                f"| {100 * timed.seconds / seconds:.2f} | {num_equal}/{rows} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
