"""Decodes with a tiny model of every causal LM that Transformers has, and compares token for token.

The oracle is the model's own forward pass with eager attention, over the whole of each row alone and again for every
token, in float64. The drafter of the sweep knows what is right and drafts right, wrong and long chains and trees at
random. One prompt, where positions suffice, is longer than a chunk of linear attention, and it comes in pieces.

    python benchmarks/model_sweep.py                     # all; writes docs/results/model_sweep.json and the page
    python benchmarks/model_sweep.py --only phimoe,opt   # some; prints
    python benchmarks/model_sweep.py --check             # all; writes nothing

The exit status is 1 where tokens are wrong, or where an error is no refusal. All take some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from model_page import PAGE, RESULTS, page
from tiny_configs import VOCAB_SIZE, build_config, causal_lm_types, variants

from emssd import Engine
from emssd.drafting import Draft, Drafter
from emssd.errors import EmssdError, UnsupportedModelError
from emssd.model.hf.refusals import check_config

__all__ = ["KnowingDrafter", "Result", "sweep", "sweep_one"]

PROMPT_LENGTHS = (17, 1, 26, 9, 12)  # windows and thresholds are of 5 to 12 tokens
LONG_PROMPT, STEP_TOKENS = 100, 40
NEW_TOKENS, BATCH_SIZE, MAX_MODEL_LEN = 20, 3, 48
_MOST_PARAMETERS = 20_000_000

SERVED, REFUSED, NOT_BUILT, WRONG, FAILED = "served", "refused", "not built", "wrong", "failed"


@dataclass(frozen=True)
class Result:
    """The result for one model.

    Attributes:
        model_type, variant: see `tiny_configs`.
        outcome: ``served`` (all tokens are right), ``refused``, ``not built``, ``wrong``, or ``failed`` (an error that
            is no refusal).
        reason: why, where it is not served.
        num_wrong: rows of other tokens than the oracle's.
        num_accepted: drafted tokens that were accepted.
        long_prompt: whether the long prompt was among the rows.
    """

    model_type: str
    variant: str
    outcome: str
    reason: str = ""
    num_wrong: int = 0
    num_accepted: int = 0
    long_prompt: bool = False


class KnowingDrafter(Drafter):
    """Knows what every row will be, and drafts any part of it, with errors of its own, up to eight tokens.

    Half of its drafts are trees: other tokens stand anywhere between those of the chain.
    """

    num_speculative_tokens = 8
    drafts_trees = True

    def __init__(self, rows: Iterable[Seq[int]]) -> None:
        self._rows = [list(row) for row in rows]
        self._random = random.Random(0)

    def propose(self, batch: Any, budget: Seq[int]) -> Draft:
        return Draft.from_trees(
            self._tree(list(row.tokens), limit, row.num_remaining - 1) for row, limit in zip(batch, budget, strict=True)
        )

    def _tree(self, tokens: list[int], limit: int, depth: int) -> list[tuple[int, int]]:
        right = next((row[len(tokens) :] for row in self._rows if row[: len(tokens)] == tokens), [])
        chain = (right + [self._random.randrange(VOCAB_SIZE) for _ in range(limit)])[: self._random.randint(0, limit)]
        if chain and self._random.random() < 0.5:
            chain[self._random.randrange(len(chain))] = self._random.randrange(VOCAB_SIZE)
        branches, nodes, depths, last = self._random.random() < 0.5, list[tuple[int, int]](), [0], -1
        for token in chain[:depth]:
            while branches and len(nodes) < limit - 1 and self._random.random() < 0.4:
                parent = self._random.choice([node for node in range(-1, len(nodes)) if depths[node + 1] < depth])
                nodes.append((self._random.randrange(VOCAB_SIZE), parent))
                depths.append(depths[parent + 1] + 1)
            if len(nodes) < limit:
                nodes.append((token, last))
                depths.append(depths[last + 1] + 1)
                last = len(nodes) - 1
        return nodes


def build_models(config: Any) -> tuple[Any, Any]:
    """The same random weights twice: as Transformers makes a model by itself, and for the oracle."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are left")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 0.3)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    oracle = AutoModelForCausalLM.from_config(
        type(config).from_dict(config.to_dict()), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    oracle.load_state_dict(model.state_dict())
    if getattr(oracle.config, "_experts_implementation", None):
        oracle.config._experts_implementation = "eager"
    return model, oracle


def prompts(model: Any) -> list[list[int]]:
    """Ragged rows of ids that are no special ones, as long as the model allows."""
    chosen, lengths = random.Random(1), [*PROMPT_LENGTHS]
    with suppress(EmssdError):
        Engine.from_model(model, max_model_len=LONG_PROMPT + NEW_TOKENS, drafter="none")
        lengths.append(LONG_PROMPT)
    return [[chosen.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    """`prompt` and its continuation, computed anew for each token."""
    row = list(prompt)
    for _ in range(NEW_TOKENS):
        row.append(int(oracle(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row


def sweep_one(model_type: str, variant: str) -> Result | None:
    """Build, decode and compare one model; ``None`` where the type has no such variant."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcome, reason, num_wrong, num_accepted, rows_in = NOT_BUILT, "", 0, 0, []
    try:
        config = build_config(model_type, variant)
        if config is None:
            return None
        outcome = REFUSED
        check_config(config, None)
        outcome = NOT_BUILT
        model, oracle = build_models(config)
        outcome = REFUSED
        Engine.from_model(model, max_model_len=MAX_MODEL_LEN, drafter="none")
        outcome = NOT_BUILT
        rows_in = prompts(model)
        rows = [greedy(oracle, prompt) for prompt in rows_in]
        outcome = FAILED
        num_wrong, num_accepted = decode(model, rows_in, rows)
        outcome = WRONG if num_wrong else SERVED
    except Exception as error:  # whatever models raise
        if outcome == REFUSED and not isinstance(error, EmssdError):
            outcome = FAILED
        text = " ".join(str(error).split()) or type(error).__name__
        reason = text if isinstance(error, UnsupportedModelError) else f"{type(error).__name__}: {text[:160]}"
    long_prompt = len(rows_in) > len(PROMPT_LENGTHS)
    return Result(model_type, variant, outcome, reason, num_wrong, num_accepted, long_prompt)


def decode(model: Any, prompts: list[list[int]], rows: list[list[int]]) -> tuple[int, int]:
    """Decode prompts. Returns how many `rows` come out otherwise, and how many drafted tokens were accepted."""
    engine = Engine.from_model(
        model, max_model_len=max(MAX_MODEL_LEN, *map(len, rows)), drafter=KnowingDrafter(rows), budget="fixed",
        batch_size=BATCH_SIZE, on_drafter_error="fail", max_step_tokens=STEP_TOKENS,
    )  # fmt: skip
    done = engine.generate(prompts, NEW_TOKENS, ignore_eos=True)
    wrong = sum([*ours.prompt_ids, *ours.token_ids] != row for ours, row in zip(done, rows, strict=True))
    return wrong, engine.report.num_accepted


def sweep(cases: list[tuple[str, str]], jobs: int) -> list[Result]:
    """Every case, in processes of their own, told as they come."""
    results = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for number, result in enumerate(pool.map(sweep_one, *zip(*cases, strict=True)), 1):
            if result is not None:
                results.append(result)
                reason = f": {result.reason}" if result.reason else ""
                print(
                    f"{number}/{len(cases)} {result.model_type} ({result.variant}): {result.outcome}{reason}",
                    flush=True,
                )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas", default="")
    parser.add_argument("--variants", help="as --only; those of tiny_configs", default="")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    arguments = parser.parse_args()
    types = [name for name in arguments.only.split(",") if name] or causal_lm_types()
    chosen = [name for name in arguments.variants.split(",") if name]
    start = time.monotonic()
    results = sweep([(name, variant) for name in types for variant in chosen or variants(name)], arguments.jobs)
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), f"in {time.monotonic() - start:.0f} s")
    if not (arguments.check or arguments.only or chosen):
        kept = {"transformers": transformers.__version__, "torch": torch.__version__}
        kept |= {"cases": [asdict(result) for result in results]}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(kept), encoding="utf-8")
    return int(counts[WRONG] + counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
