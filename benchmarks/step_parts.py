"""Parts of a step on a CPU: verifying a token tree against a chain, and choosing sampled tokens.

    python benchmarks/step_parts.py trees --model MODEL --out docs/results/tree_step.json
    python benchmarks/step_parts.py sampling --model MODEL --dtype float32 --threads 1

`trees` compares a step that verifies a token tree with one that verifies a chain of as many nodes. A step packs, runs,
verifies, and moves the KV of an accepted node in each row. `sampling` compares choosing tokens by the kernel with
choosing them by PyTorch, the host's work for each row included, and with the rest of the step. ``--model random`` is a
Llama of 134M random weights: its logits are flat, so that noise is hashed for every token.

All variants take turns; figures are medians of the turns, and a ratio is that of a turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from common import best_ms, make_parser, medians, save, show
from emssd_ragged.backend import ragged_backend

from emssd.attention import Kept
from emssd.decoding.choosing import choices
from emssd.decoding.packing import pack
from emssd.decoding.verify import verify
from emssd.drafting import Draft
from emssd.model import CausalLMRunner, TargetModel, load_model
from emssd.native import load_kernels
from emssd.sampling import SamplingParams
from emssd.sampling.choice import greedy_tokens
from emssd.sequences import Batch, Request, Row

TREES: dict[str, Callable[[int], list[int]]] = {  # parents by number of nodes
    "bushy": lambda n: [node // 4 - 1 for node in range(n)],  # four children each
    "long": lambda n: [-1, -1, 0, *range(2, n - 1)],  # one path, and a sibling of its first node
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T": {},
    "T, top_k 50": {"top_k": 50},
    "T, top_p 0.9": {"top_p": 0.9},
    "all, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
TEMPERATURE = 0.8


def load(name: str, dtype: str, *, compile: bool) -> TargetModel:
    if name != "random":
        return load_model(name, dtype=dtype, device="cpu", compile=compile)[0]
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048,
    )  # fmt: skip
    return TargetModel(transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval(), compile=compile)


class Steps:
    """Rows of one length whose tokens are cached but for the newest, and steps over them that can be run again."""

    def __init__(self, model: TargetModel, batch_size: int, context: int) -> None:
        self.runner = CausalLMRunner(model, backend := ragged_backend())
        backend.allocate(model.kv_cache_spec(batch_size))
        self.prompts = torch.randint(4, model.vocab_size, (batch_size, context + 1)).tolist()
        self.context, self.batch = context, self.sampled(SamplingParams())
        for row in self.batch:
            row.num_cached = 0
        self.runner.run(pack([], Draft.empty(0), [(row, context) for row in self.batch]))
        for row in self.batch:
            row.num_cached = context

    def sampled(self, params: SamplingParams) -> Batch:
        """The rows, sampled in that way."""
        requests = [Request(str(row), tuple(ids), 9, sampling=params) for row, ids in enumerate(self.prompts)]
        return Batch(tuple(Row(each, num_cached=len(each.prompt_ids) - 1) for each in requests))

    def draft(self, parents: list[int] | None, num_nodes: int) -> Draft:
        """The same shape for each row, with random tokens."""
        ids = torch.randint(4, self.runner.vocab_size, (len(self.prompts) * num_nodes,))
        indptr = tuple(range(0, len(ids) + 1, num_nodes)) if num_nodes else (0,) * (len(self.prompts) + 1)
        return Draft(ids, indptr, None if parents is None else tuple(parents) * len(self.prompts))

    def step(self, draft: Draft) -> torch.Tensor:
        """One step, in which each row keeps a drafted token if there is one. Returns the logits."""
        logits = self.runner.run(pack(self.batch.rows, draft)).logits
        verify(greedy_tokens(logits), self.batch.rows, draft)
        kept = self.context + (2 if len(draft.token_ids) else 0)
        moved = ((self.context + 2,),) * len(self.prompts) if draft.parents is not None else ()
        self.runner.commit(Kept(tuple(row.request_id for row in self.batch), (kept,) * len(self.prompts), moved))
        return logits


def turns(runs: dict[str, Callable[[], object]], repeats: int, times: int) -> list[dict[str, float]]:
    """Milliseconds of each run in each turn; one more turn before them warms up."""
    return [{name: best_ms(run, times) for name, run in runs.items()} for _ in range(repeats + 1)][1:]


def measure_trees(model: TargetModel, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for batch_size in given.batch_sizes:
        for context in given.contexts:
            steps = Steps(model, batch_size, context)
            for nodes in given.nodes:
                drafts = {"chain": steps.draft(None, nodes)}
                drafts |= {name: steps.draft(parents(nodes), nodes) for name, parents in TREES.items()}
                runs = {name: partial(steps.step, draft) for name, draft in drafts.items()}
                found = turns(runs, given.repeats, 3)
                row: dict[str, Any] = {"batch_size": batch_size, "context": context, "nodes": nodes, "turns": found}
                row |= {f"{name}_ms": value for name, value in medians(found).items()}
                row |= {
                    f"{name}_ratio": statistics.median(turn[name] / turn["chain"] for turn in found) for name in TREES
                }
                rows.append(row)
    return rows


def measure_sampling(model: TargetModel, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows, (context, *_) = [], given.contexts
    for batch_size in given.batch_sizes:
        steps = Steps(model, batch_size, context)
        nothing = steps.draft(None, 0)
        logits = steps.step(nothing)
        batches = {name: steps.sampled(SamplingParams(TEMPERATURE, **how)) for name, how in SAMPLINGS.items()}
        runs: dict[str, Callable[[], Any]] = {"step": partial(steps.step, nothing)}
        for name, batch in batches.items():
            runs[name] = partial(choices, logits, batch, nothing)
            runs[f"{name}, PyTorch"] = partial(_without_kernels, runs[name])
        found = turns(runs, given.repeats, 3)
        middle = medians(found)
        for name in batches:
            kernel, other = middle[name], middle[f"{name}, PyTorch"]
            row = {"batch_size": batch_size, "sampling": name, "kernel_ms": kernel, "pytorch_ms": other}
            row |= {"step_ms": middle["step"] + kernel, "share": kernel / (middle["step"] + kernel)}
            row |= {"turns": [turn[name] for turn in found]}
            rows.append(row | {"same_tokens": torch.equal(runs[name](), runs[f"{name}, PyTorch"]())})
    return rows


def _without_kernels(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with patch("emssd.sampling.choice.loaded_kernels", lambda: None):
        return run()


COLUMNS = {
    "trees": ("batch_size", "context", "nodes", "chain_ms", *(f"{name}_ratio" for name in TREES)),
    "sampling": ("batch_size", "sampling", "kernel_ms", "pytorch_ms", "step_ms", "share", "same_tokens"),
}


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("part", choices=list(COLUMNS))
    parser.add_argument("--model", default="random", help="a folder, 'demo' or 'random'")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64], help="cached tokens of each row")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16], help="of a tree, and of its chain")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    load_kernels()
    model = load(given.model, given.dtype, compile=given.compile)
    rows = measure_trees(model, given) if given.part == "trees" else measure_sampling(model, given)
    lines = [[row[name] if not isinstance(row[name], float) else f"{row[name]:.3f}" for name in COLUMNS[given.part]]
             for row in rows]  # fmt: skip
    show(f"{given.part}, {given.threads} threads", COLUMNS[given.part], lines)
    save(given.out, rows, dtype=getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
