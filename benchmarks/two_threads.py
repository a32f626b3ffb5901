"""Two engines of one model in two threads, and the model's own forward in a third: every row and every logit is right.

    python benchmarks/two_threads.py --minutes 10

The first engine decodes greedily, the second samples; both draft. Exits with 1 if a row differs from what one engine
gives alone, if the model's own logits differ, or if the model is not left as it was.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from threading import Thread
from typing import Any

import torch

from emssd import Engine
from emssd.sampling import SamplingParams
from emssd.testing.models import tiny_model

PROMPTS = [[3 + (i * i + row) % 9 for i in range(5 + 9 * row)] for row in range(6)]
DRAFTERS = ("suffix", "pld", "none", "early_exit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = tiny_model("llama", vocab_size=13, num_hidden_layers=2, max_model_len=128)
    ids = torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        logits = model(ids).logits
    before = [(dict(vars(each)), [*each._forward_hooks]) for each in model.modules()]
    choices: list[dict[str, Any]] = [{}, {"sampling": SamplingParams(temperature=1.0, seed=options.seed)}]
    alone = [Engine.from_model(model, drafter="none").generate(PROMPTS, 24, **choice) for choice in choices]
    until, counts = time.monotonic() + 60 * options.minutes, {"rows": 0, "passes": 0, "wrong": 0, "errors": 0}

    def decode(place: int) -> None:
        drawn = random.Random(options.seed + place)
        while time.monotonic() < until:
            try:
                engine = Engine.from_model(model, drafter=drawn.choice(DRAFTERS), batch_size=drawn.randint(1, 4))
                for done, right in zip(engine.generate(PROMPTS, 24, **choices[place]), alone[place], strict=True):
                    counts["rows"] += 1
                    counts["wrong"] += done.token_ids != right.token_ids
            except Exception as error:
                counts["errors"] += 1
                print(repr(error), file=sys.stderr)

    def call() -> None:
        while time.monotonic() < until:
            try:
                with torch.no_grad():
                    counts["wrong"] += not torch.equal(model(ids).logits, logits)
                counts["passes"] += 1
            except Exception as error:
                counts["errors"] += 1
                print(repr(error), file=sys.stderr)

    threads = [Thread(target=decode, args=[0]), Thread(target=decode, args=[1]), Thread(target=call)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    left = [(dict(vars(each)), [*each._forward_hooks]) for each in model.modules()] == before
    left &= model.config._attn_implementation == "sdpa"
    print(f"{counts}; the model is {'as it was' if left else 'NOT as it was'}")
    sys.exit(int(not left or counts["wrong"] + counts["errors"] > 0))


if __name__ == "__main__":
    main()
