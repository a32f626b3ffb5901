"""A short GRPO training with TRL, in which every rollout is decoded in several ways in turn, from the same noise.

The data is a local JSONL file of questions and answers as in GSM8K; a completion is rewarded for the answer's last
number, and for its end. The trainer learns from the first way that is emssd's. Drafts must change no text: that is
checked. Transformers draws other noise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported
os.environ["HF_HUB_OFFLINE"] = "1"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with the fields question and answer")
    parser.add_argument("--template", default="Question: {question}\nAnswer:", help="the prompt")
    parser.add_argument("--questions", type=int, default=6, help="of the data; each epoch sees all of them")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--questions-per-step", type=int, default=2)
    parser.add_argument("--generations", type=int, default=8, help="completions of each question")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 8")
    parser.add_argument("--only", nargs="+", help="words of the ways to decode, such as group; all by default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true", help="decode with a compiled program")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, where other programs run beside it")
    parser.add_argument("--budget", default="adaptive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--repeats", type=int, default=1, help="trainings, each with a seed of its own")
    return parser


def last_number(text: str) -> str | None:
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else None


def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    longest = max(map(len, completion_ids))
    return [
        float(last_number(text) == last_number(right)) + 0.2 * (len(ids) < longest)
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


class InTurn:
    """A ``rollout_func`` that decodes each rollout in all `ways`, from the same noise, and measures them.

    Attributes:
        rows: by way, of each rollout the seconds, tokens, steps, and the tokens that all steps computed.
    """

    def __init__(self, ways: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self.ways, self.clock, self.same, self.number = ways, clock, True, 0
        self.rows: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in ways}

    def __call__(self, prompts: list[Any], trainer: Any) -> Any:
        import torch

        state, found, names = torch.get_rng_state(), dict[str, Any](), list(self.ways)
        first = self.number % len(names)  # none has the same place in all rollouts
        self.number += 1
        for name in [*names[first:], *names[:first]]:
            torch.set_rng_state(state)
            rollouts, start = self.ways[name], self.clock()
            texts = by_transformers(prompts, trainer) if rollouts is None else rollouts(prompts, trainer)
            seconds, steps, computed = self.clock() - start, max(map(len, texts["completion_ids"])), 0
            if rollouts is not None:
                found[name], steps, computed = texts, rollouts.report.num_steps, rollouts.report.num_tokens
            self.rows[name].append((seconds, sum(map(len, texts["completion_ids"])), steps, computed))
        own = list(found.values())
        self.same &= all(each["completion_ids"] == own[0]["completion_ids"] for each in own)
        return own[0]


def by_transformers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    import torch

    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    model.eval()
    with torch.no_grad():
        ids = model.generate(**inputs, generation_config=trainer.generation_config)[:, inputs["input_ids"].shape[1] :]
    model.train()
    return {"completion_ids": [[token for token in row if token != tokenizer.pad_token_id] for row in ids.tolist()]}


def train(rollouts: InTurn, seed: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """One training. Returns its losses and rewards."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    records = [json.loads(line) for line in lines]
    data = [{"prompt": arguments.template.format(**each), "answer": each["answer"]} for each in records]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    if arguments.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.0))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=arguments.questions_per_step * arguments.generations,
            num_generations=arguments.generations,
            num_train_epochs=arguments.epochs,
            max_completion_length=arguments.max_new_tokens,
            temperature=arguments.temperature,
            learning_rate=arguments.learning_rate,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            rollout_func=rollouts,
        )
        trainer.train()
    logged = [each for each in trainer.state.log_history if "loss" in each]
    return {"losses": [each["loss"] for each in logged], "rewards": [each["reward"] for each in logged]}


def ways_of(arguments: argparse.Namespace) -> dict[str, Any]:
    from emssd_anpd import ANPDConfig

    from emssd.integrations.trl import Rollouts

    def ours(drafter: Any) -> Any:
        return Rollouts(drafter=drafter, budget=arguments.budget, compile=arguments.compile)

    ways = {
        "emssd, no drafts": ours("none"),
        "emssd, `suffix`": ours("suffix"),
        "emssd, `anpd`": ours("anpd"),
        "emssd, `anpd` with group memory": ours(ANPDConfig(group_tokens=1_000_000)),
        "`generate` of Transformers": None,
    }
    words = arguments.only or [""]
    return {name: each for name, each in ways.items() if any(word in name for word in words)}


def speeds(rows: list[tuple[float, int, int, int]], epochs: int) -> list[float]:
    """Tokens per second in each epoch."""
    size = len(rows) // epochs
    parts = [rows[epoch * size : (epoch + 1) * size] for epoch in range(epochs)]
    return [sum(row[1] for row in part) / sum(row[0] for row in part) for part in parts]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    arguments = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore", module="trl")
    runs = list[dict[str, Any]]()
    for seed in range(arguments.seed, arguments.seed + arguments.repeats):
        rollouts = InTurn(ways_of(arguments), time.process_time if arguments.cpu_time else time.perf_counter)
        learned = train(rollouts, seed, arguments)
        runs.append({"rows": rollouts.rows, "same": rollouts.same} | learned)
    show(runs, arguments.epochs)
    if arguments.out:
        arguments.out.write_text(json.dumps({"arguments": vars(arguments), "runs": runs}, default=str, indent=1) + "\n")
    return runs


def show(runs: list[dict[str, Any]], epochs: int) -> None:
    """Medians over the trainings, and in brackets the least and the largest ratio."""
    columns = " | ".join(f"tokens/s, epoch {epoch + 1}" for epoch in range(epochs))
    print(f"| rollouts by | {columns} | steps | tokens computed | × the first |")
    print("|---|" + "---|" * (epochs + 3))
    names = list(runs[0]["rows"])
    for name in names:
        by_epoch = zip(*(speeds(run["rows"][name], epochs) for run in runs), strict=True)
        ratios = [total(run["rows"][name]) / total(run["rows"][names[0]]) for run in runs]
        steps, computed = (statistics.median(sum(row[k] for row in run["rows"][name]) for run in runs) for k in (2, 3))
        line = " | ".join(f"{statistics.median(each):.0f}" for each in by_epoch)
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"
        print(f"| {name} | {line} | {steps:.0f} | {computed:.0f} | {ratio} |")
    print(f"texts are {'the same' if all(run['same'] for run in runs) else 'NOT the same'} with and without drafts")


def total(rows: list[tuple[float, int, int, int]]) -> float:
    """Tokens per second of a training."""
    return sum(row[1] for row in rows) / sum(row[0] for row in rows)


if __name__ == "__main__":
    main()
