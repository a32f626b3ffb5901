"""A short GRPO training with TRL: how far log-probabilities of rollouts are from the trainer's.

With and without `emssd.integrations.batch_invariant`, after each rollout the trainer's model computes the completions
again in one padded batch. Its log-softmax in float64 is compared with what the rollout gave. TRL's own, which it
computes from the same logits in their dtype, is compared too: the importance ratio of a rollout is the
exponential of the difference. The data is a local JSONL file with questions, as in GSM8K.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported
os.environ["HF_HUB_OFFLINE"] = "1"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with the field question")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT")
    return parser


def padded(rows: list[list[int]]) -> dict[str, Any]:
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def differences(model: Any, found: dict[str, Any]) -> list[float]:
    """The distance of each token's log-probability from `model`'s now."""
    rows = [list(a) + list(b) for a, b in zip(found["prompt_ids"], found["completion_ids"], strict=True)]
    logits = model(**padded(rows)).logits.detach().double().log_softmax(-1)
    return [
        abs(float(logits[row, len(prompt) - 1 + place, token]) - share)
        for row, (prompt, tokens, shares) in enumerate(
            zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True)
        )
        for place, (token, share) in enumerate(zip(tokens, shares, strict=True))
    ]


def train(arguments: argparse.Namespace, invariant: bool) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from emssd.integrations.batch_invariant import batch_invariant
    from emssd.integrations.trl import Rollouts

    seen, ratios = list[list[float]](), list[float]()

    class Compared(Rollouts):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            found = super().__call__(prompts, trainer)
            seen.append(differences(trainer.model, found))
            return found

    class Trainer(GRPOTrainer):  # type: ignore[misc]  # TRL may be absent where types are checked
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            self.last, *more = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.last, *more

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss = super()._compute_loss(model, inputs)
            ratio = torch.exp(self.last.detach().double() - inputs["sampling_per_token_logps"].double())
            ratios.append(float((ratio - 1)[inputs["completion_mask"].bool()].abs().max()))
            return loss

    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.steps]
    data = [{"prompt": f"Question: {json.loads(line)['question']}\nAnswer:"} for line in lines]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    if arguments.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0))
    with tempfile.TemporaryDirectory() as folder, batch_invariant(model) if invariant else nullcontext():
        config = GRPOConfig(
            output_dir=folder, report_to=[], use_cpu=True, bf16=False, max_steps=arguments.steps, temperature=1.0,
            per_device_train_batch_size=arguments.generations, num_generations=arguments.generations,
            max_completion_length=arguments.max_new_tokens, learning_rate=arguments.learning_rate, save_strategy="no",
            disable_tqdm=True, seed=0, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            model=model,
            reward_funcs=lambda completion_ids, **_: [len({*ids}) / len(ids) for ids in completion_ids],
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            rollout_func=Compared(batch_invariant=invariant),
        )
        trainer.train()
    every = [each for step in seen for each in step]
    assert torch.isfinite(torch.tensor(every)).all()
    return {"tokens": len(every), "mean": sum(every) / len(every), "largest": max(every), "first": max(seen[0]),
            "differ": sum(each > 0 for each in every), "ratio": max(ratios), "steps": len(seen)}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    arguments = make_parser().parse_args(argv)
    rows = {"the model's own": train(arguments, False), "`batch_invariant`": train(arguments, True)}
    print("| forward pass | steps | tokens | differ | mean difference | largest | in step 1 | TRL's ratios, from 1 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['steps']} | {row['tokens']} | {row['differ']} | {row['mean']:.1e} | {row['largest']:.1e} "
            f"| {row['first']:.1e} | {row['ratio']:.1e} |"
        )
    return rows


if __name__ == "__main__":
    main()
