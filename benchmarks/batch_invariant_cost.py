"""The price of `emssd.integrations.batch_invariant` for a trainer: forward and backward passes, with and without it.

Rows are of random ids and of one length, or of many lengths in a padded batch. The median of each counts, in seconds of
the processor, which other processes disturb less than those of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["4x128", "8x256", "4x1024"], help="rows x tokens")
    parser.add_argument("--ragged", action="store_true", help="rows of half the length to all of it, padded")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--profile", action="store_true", help="show where the time goes in the place of the table")
    return parser


def batch(rows: int, tokens: int, vocab_size: int, ragged: bool) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(tokens / 2 if ragged else tokens, tokens, rows).long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    ids = torch.randint(vocab_size, (rows, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def seconds(model: Any, given: dict[str, Any]) -> tuple[float, float]:
    """Time a forward pass, and both."""
    start = time.process_time()
    loss = model(**given).loss
    forward = time.process_time() - start
    loss.backward()
    both = time.process_time() - start
    model.zero_grad()
    return forward, both


def profile(model: Any, given: dict[str, Any]) -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        seconds(model, given)
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=45))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    from emssd.integrations.batch_invariant import batch_invariant

    arguments, found = make_parser().parse_args(argv), list[dict[str, Any]]()
    torch.set_num_threads(arguments.threads)
    print(f"{torch.get_num_threads()} threads")
    print("| dtype | rows x tokens | own forward, both, ms | batch-invariant | forward, times | both, times |")
    print("|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).train()
        for shape in arguments.shapes:
            rows, tokens = map(int, shape.split("x"))
            given = batch(rows, tokens, model.config.vocab_size, arguments.ragged)
            own, invariant = list[tuple[float, float]](), list[tuple[float, float]]()
            if arguments.profile:
                profile(model, given)
                with batch_invariant(model):
                    profile(model, given)
            for turn in range(arguments.turns + 1):
                one = seconds(model, given)
                with batch_invariant(model):
                    other = seconds(model, given)
                if turn:  # the first warms up
                    own.append(one)
                    invariant.append(other)
            middle = [
                [1000 * statistics.median(each) for each in zip(*times, strict=True)] for times in (own, invariant)
            ]
            (forward, both), (forward_then, both_then) = middle
            found.append({"dtype": dtype, "shape": shape, "times": both_then / both})
            print(
                f"| {dtype} | {shape} | {forward:.0f}, {both:.0f} | {forward_then:.0f}, {both_then:.0f} "
                f"| {forward_then / forward:.2f} | {both_then / both:.2f} |",
                flush=True,
            )
    return found


if __name__ == "__main__":
    main()
