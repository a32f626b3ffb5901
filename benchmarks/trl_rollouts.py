"""A short GRPO training with TRL, in which every rollout is decoded in several ways in turn, from the same noise.

The data is a local JSONL file of questions and answers as in GSM8K; a completion is rewarded for the answer's last
number, and for its end. The trainer learns from the first way that is emssd's. Drafts must change no text: that is
checked. Transformers draws other noise.

With `--bits`, it trains with and without `emssd.integrations.batch_invariant` instead. After each rollout, the model
computes the completions again in one padded batch, and its log-softmax in float64 is compared with the rollout's
log-probabilities. TRL's own log-softmax, in the dtype of the logits, gives the importance ratios.
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
from contextlib import AbstractContextManager, nullcontext
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
    parser.add_argument("--bits", action="store_true", help="compare log-probabilities at temperature 1, and no speed")
    return parser


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None


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

        state, ours, names = torch.get_rng_state(), dict[str, Any](), list(self.ways)
        first = self.number % len(names)  # none has the same place in all rollouts
        self.number += 1
        for name in [*names[first:], *names[:first]]:
            torch.set_rng_state(state)
            rollouts, start = self.ways[name], self.clock()
            texts = by_transformers(prompts, trainer) if rollouts is None else rollouts(prompts, trainer)
            seconds, steps, computed = self.clock() - start, max(map(len, texts["completion_ids"])), 0
            if rollouts is not None:
                ours[name], steps, computed = texts, rollouts.report.num_steps, rollouts.report.num_tokens
            self.rows[name].append((seconds, sum(map(len, texts["completion_ids"])), steps, computed))
        first_texts, *others = ours.values()
        self.same &= all(texts["completion_ids"] == first_texts["completion_ids"] for texts in others)
        return first_texts


def by_transformers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    import torch

    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    model.eval()
    with torch.no_grad():
        ids = model.generate(**inputs, generation_config=trainer.generation_config)[:, inputs["input_ids"].shape[1] :]
    model.train()
    return {"completion_ids": [[token for token in row if token != tokenizer.pad_token_id] for row in ids.tolist()]}


def train(
    rollouts: Any,
    seed: int,
    arguments: argparse.Namespace,
    trainer_class: Any = None,
    within: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, list[float]]:
    """One training, `within` a context of its model. Returns its losses and rewards."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    records = [json.loads(line) for line in lines]
    data = [{"prompt": arguments.template.format(**record), "answer": record["answer"]} for record in records]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    if arguments.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.0))
    with tempfile.TemporaryDirectory() as folder, within(model):
        config = GRPOConfig(
            output_dir=folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            per_device_train_batch_size=arguments.questions_per_step * arguments.generations,
            num_generations=arguments.generations, num_train_epochs=arguments.epochs,
            max_completion_length=arguments.max_new_tokens, temperature=arguments.temperature,
            learning_rate=arguments.learning_rate, logging_steps=1, save_strategy="no", disable_tqdm=True, seed=seed,
        )  # fmt: skip
        trainer = (trainer_class or GRPOTrainer)(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            rollout_func=rollouts,
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": [entry["loss"] for entry in logged], "rewards": [entry["reward"] for entry in logged]}


def differences(model: Any, texts: dict[str, Any]) -> list[float]:
    """The distance of each token's log-probability from `model`'s now."""
    import torch

    rows = [[*prompt, *tokens] for prompt, tokens in zip(texts["prompt_ids"], texts["completion_ids"], strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits.detach().double().log_softmax(-1)
    return [
        abs(float(logits[row, len(prompt) - 1 + index, token]) - logprob)
        for row, (prompt, tokens, logprobs) in enumerate(
            zip(texts["prompt_ids"], texts["completion_ids"], texts["logprobs"], strict=True)
        )
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


def compared_bits(arguments: argparse.Namespace, invariant: bool) -> dict[str, Any]:
    """One training: how far log-probabilities are from the rollouts', and importance ratios from 1."""
    import torch
    from trl import GRPOTrainer

    from emssd.integrations.batch_invariant import batch_invariant
    from emssd.integrations.trl import Rollouts

    by_step, ratios = list[list[float]](), list[float]()

    class Compared(Rollouts):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            texts = super().__call__(prompts, trainer)
            by_step.append(differences(trainer.model, texts))
            return texts

    class Trainer(GRPOTrainer):  # type: ignore[misc]  # TRL may be absent where types are checked
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            self.last, *more = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.last, *more

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss = super()._compute_loss(model, inputs)
            ratio = torch.exp(self.last.detach().double() - inputs["sampling_per_token_logps"].double())
            ratios.append(float((ratio - 1)[inputs["completion_mask"].bool()].abs().max()))
            return loss

    arguments.temperature = 1.0  # others change the rollout's log-probabilities
    within = batch_invariant if invariant else nullcontext
    train(Compared(batch_invariant=invariant), arguments.seed, arguments, Trainer, within)
    distances = [distance for step in by_step for distance in step]
    assert torch.isfinite(torch.tensor(distances)).all()
    return {"steps": len(by_step), "tokens": len(distances), "differ": sum(distance > 0 for distance in distances),
            "mean difference": sum(distances) / len(distances), "largest": max(distances), "in step 1": max(by_step[0]),
            "TRL's ratios, from 1": max(ratios)}  # fmt: skip


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
    return {name: rollouts for name, rollouts in ways.items() if any(word in name for word in words)}


def speeds(rows: list[tuple[float, int, int, int]], epochs: int) -> list[float]:
    """Tokens per second in each epoch."""
    size = len(rows) // epochs
    parts = [rows[epoch * size : (epoch + 1) * size] for epoch in range(epochs)]
    return [sum(row[1] for row in part) / sum(row[0] for row in part) for part in parts]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    arguments = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore", module="trl")
    runs = list[dict[str, Any]]()
    if arguments.bits:
        runs = [compared_bits(arguments, invariant) for invariant in (False, True)]
        print(f"| forward pass | {' | '.join(runs[0])} |\n|---|{'---|' * len(runs[0])}")
        for name, run in zip(("the model's own", "`batch_invariant`"), runs, strict=True):
            print(f"| {name} | {' | '.join(f'{figure:.3g}' for figure in run.values())} |")
        return runs
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
        line = " | ".join(f"{statistics.median(rates):.0f}" for rates in by_epoch)
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"
        print(f"| {name} | {line} | {steps:.0f} | {computed:.0f} | {ratio} |")
    print(f"texts are {'the same' if all(run['same'] for run in runs) else 'NOT the same'} with and without drafts")


def total(rows: list[tuple[float, int, int, int]]) -> float:
    """Tokens per second of a training."""
    return sum(row[1] for row in rows) / sum(row[0] for row in rows)


if __name__ == "__main__":
    main()
