"""A short GRPO training with TRL, sampled by Transformers and by emssd: tokens per second, and what is learned.

The data is a local JSONL file of questions and answers as in GSM8K; a completion is rewarded for the answer's last
number, and for its end. Drafts must change neither rewards nor losses: that is checked. Transformers draws other noise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
import warnings
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
    parser.add_argument("--cache-tokens", type=int, default=100_000, help="of earlier rollouts that suffix remembers")
    parser.add_argument("--only", nargs="+", help="words of the rollouts to train with, such as memory; all by default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, where other programs run beside it")
    parser.add_argument("--budget", default="adaptive", help="of the cells with suffix")
    parser.add_argument(
        "--suffix", nargs="+", default=[], metavar="NAME=NUMBER", help="options of suffix, in all its cells"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
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


def train(name: str, rollouts: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training, and the seconds that its rollouts took."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    records = [json.loads(line) for line in lines]
    data = [{"prompt": arguments.template.format(**each), "answer": each["answer"]} for each in records]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            report_to=[],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=arguments.questions_per_step * arguments.generations,
            num_generations=arguments.generations,
            num_train_epochs=arguments.epochs,
            max_completion_length=arguments.max_new_tokens,
            temperature=arguments.temperature,
            learning_rate=arguments.learning_rate,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=arguments.seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            rollout_func=rollouts,
        )
        generate, seconds, tokens, steps = trainer._generate, list[float](), list[int](), list[int]()
        texts, clock = list[list[list[int]]](), time.process_time if arguments.cpu_time else time.perf_counter

        def timed(prompts: list[Any]) -> Any:
            start = clock()
            found = generate(prompts)
            seconds.append(clock() - start)
            tokens.append(sum(map(len, found[1])))
            texts.append([list(ids) for ids in found[1]])
            steps.append(max(map(len, found[1])) if rollouts is None else rollouts.report.num_steps)
            return found

        trainer._generate = timed
        start = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - start
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    rewards = [each["reward"] for each in trainer.state.log_history if "loss" in each]
    return {
        "name": name,
        "seconds": seconds,
        "tokens": tokens,
        "steps": steps,
        "texts": texts,
        "whole": whole,
        "losses": losses,
        "rewards": rewards,
    }


def speed(row: dict[str, Any], epoch: int, epochs: int) -> float:
    """Tokens per second of the rollouts of one epoch."""
    size = len(row["tokens"]) // epochs
    part = slice(epoch * size, (epoch + 1) * size)
    return float(sum(row["tokens"][part]) / sum(row["seconds"][part]))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    from emssd_suffix import SuffixConfig

    from emssd.integrations.trl import Rollouts

    arguments = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore", module="trl")
    remembers: dict[str, Any] = {"cache_tokens": arguments.cache_tokens}
    group = remembers | {"per_prompt": True, "cache_bias": 0}
    given = {name: json.loads(value) for name, value in (option.split("=") for option in arguments.suffix)}

    def suffix(**options: Any) -> Rollouts:
        return Rollouts(drafter=SuffixConfig(**options, **given), budget=arguments.budget)

    choices = {
        "`generate` of Transformers": None,
        "emssd, `drafter=none`": Rollouts(drafter="none"),
        "emssd, `drafter=suffix`": suffix(),
        "emssd, `suffix` that remembers": suffix(**remembers),
        "emssd, `suffix` with group memory": suffix(**group),
    }
    if arguments.only:
        choices = {name: each for name, each in choices.items() if any(word in name for word in arguments.only)}
    rows = [train(name, rollouts, arguments) for name, rollouts in choices.items()]
    plain, epochs = rows[0], range(arguments.epochs)
    print(
        "| rollouts by | "
        + " | ".join(f"tokens/s, epoch {epoch + 1}" for epoch in epochs)
        + " | steps | times as fast |"
    )
    print("|---|" + "---|" * (arguments.epochs + 2))
    for row in rows:
        speeds = " | ".join(f"{speed(row, epoch, arguments.epochs):.0f}" for epoch in epochs)
        times = sum(row["tokens"]) / sum(row["seconds"]) / (sum(plain["tokens"]) / sum(plain["seconds"]))
        print(f"| {row['name']} | {speeds} | {sum(row['steps'])} | {times:.2f} |")
    ours = [row for row in rows if "emssd" in row["name"]]
    same = all(row[what] == ours[0][what] for row in ours for what in ("losses", "rewards", "texts"))
    print(f"texts, losses and rewards are {'the same' if same else 'NOT the same'} with and without drafts")
    if arguments.out:
        for row in rows:
            del row["texts"]
        arguments.out.write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
