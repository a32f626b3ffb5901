"""Milliseconds of a step of a model with linear attention: plain, with chains of 4 and with trees of 16 nodes.

    python benchmarks/states.py --out docs/results/states.json

The model has 152M random parameters in the shape of Qwen3.5: 9 of its 12 layers keep a state of 16 x 128 x 128 numbers
a row. Nothing that is drafted is right, so each step verifies, rejects and goes on from its state. Transformers decodes
the same rows, all equally long, with its own cache. All take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from emssd import Engine
from emssd.drafting import Draft, Drafter
from emssd.sequences import Request

SHAPE = {
    "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TREE = [-1, -1, -1, -1, *(node // 3 for node in range(12))]  # 4 roots, of which each has 3 children


class Fixed(Drafter):
    """Drafts the same tree for each row.

    Args:
        parents: of its nodes.
    """

    drafts_trees = True

    def __init__(self, parents: Seq[int]) -> None:
        self._parents, self.num_speculative_tokens = parents, len(parents)

    def propose(self, batch: Any, budget: Seq[int]) -> Draft:
        return Draft.from_trees([[(7, parent) for parent in self._parents] for _ in batch])


def engine_steps(model: Any, drafter: Drafter | str, prompts: list[list[int]], num_new: int) -> Callable[[], object]:
    """`Engine.step`, once prompts are computed."""
    engine = Engine.from_model(model, drafter=drafter, budget="fixed", batch_size=len(prompts), frozen=True)
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), tuple(prompt), num_new))
    for _ in range(4):
        engine.step()
    return engine.step


def transformers_steps(model: Any, prompts: list[list[int]]) -> Callable[[], object]:
    """The same of Transformers, greedily, with its own cache."""
    with torch.inference_mode():
        out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    state = {"cache": out.past_key_values, "ids": out.logits[:, -1:].argmax(-1)}

    @torch.inference_mode()
    def step() -> None:
        out = model(state["ids"], past_key_values=state["cache"], use_cache=True)
        state["cache"], state["ids"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    for _ in range(3):
        step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SHAPE)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    found: dict[int, dict[str, float]] = {}
    for batch_size in options.batch_sizes:
        prompts = torch.randint(3, 30000, (batch_size, options.prompt)).tolist()
        num_new = 20 * options.repeats
        runs = {
            "Transformers": transformers_steps(model, prompts),
            "plain": engine_steps(model, "none", prompts, num_new),
            "chain of 4": engine_steps(model, Fixed(range(-1, 3)), prompts, num_new),
            "tree of 16": engine_steps(model, Fixed(TREE), prompts, num_new),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(1000 * (time.perf_counter() - start))
        found[batch_size] = {name: statistics.median(each) for name, each in times.items()}
    table = Table("rows", *(name for name in runs))
    for batch_size, each in found.items():
        table.add_row(str(batch_size), *(f"{ms:.1f} ({ms / each['plain']:.2f})" for ms in each.values()))
    Console().print(table)
    if options.out:
        options.out.write_text(json.dumps({"threads": torch.get_num_threads(), "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
