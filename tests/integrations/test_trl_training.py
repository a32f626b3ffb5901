"""Trainers of TRL learn the same whatever drafts, by `Rollouts` and by `emssd.speculate`; nox -s trl."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import emssd
from emssd.data.demo import model_path
from emssd.drafting.budget import FixedBudget
from emssd.integrations.trl import Rollouts
from tests.cli.conftest import CHAT_TEMPLATE, byte_tokenizer, save_model

from .test_trl import NUM_NEW, PROMPTS, REMEMBERS, make_model, step_in_place

pytest.importorskip("trl", reason="TRL is not installed: nox -s trl, or pip install 'emssd[trl]'")
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from benchmarks.trl_rollouts import main

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


def trained(tmp_path: Path, make: str, drafter: Any, *, is_chat: bool = False, **options: Any) -> tuple[Any, ...]:
    """The log of a trainer of TRL, the completions, its model's weights, and the accepted tokens of its rollouts.

    Without a `drafter`, Transformers decodes alone.
    """
    shown: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        """The share of vowels."""
        if args.beta:
            torch.manual_seed(len(shown))  # whoever has decoded
        shown.append(completions)
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [sum(letter in "aeiou" for letter in text) / NUM_NEW for text in texts]

    num_accepted = [0]

    class Counted(Rollouts):
        def __call__(self, *arguments: Any) -> Any:
            done = super().__call__(*arguments)
            num_accepted[0] += self.report.num_accepted if self.report else 0
            return done

    tokenizer, model = byte_tokenizer(), make_model(dropout=0.1)
    tokenizer.chat_template = CHAT_TEMPLATE
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS] if is_chat else PROMPTS
    parts = {"model": model, "reward_funcs": reward, "processing_class": tokenizer}
    parts["train_dataset"] = Dataset.from_dict({"prompt": prompts})
    options = {
        "output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "max_steps": 3, "logging_steps": 1, "seed": 5,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, "temperature": 0.4, **options,
    }  # fmt: skip
    if make == "online_dpo":
        model.generate = partial(model.generate, custom_generate=emssd.custom_generate, drafter=drafter)
        args = OnlineDPOConfig(per_device_train_batch_size=3, max_new_tokens=NUM_NEW, max_length=96, **options)
        trainer = OnlineDPOTrainer(args=args, **parts)
        trainer.train()
    else:
        options |= {"use_transformers_continuous_batching": make == "continuous_batching", "num_generations": 4}
        args = GRPOConfig(per_device_train_batch_size=8, max_completion_length=NUM_NEW, **options)
        rollouts = Counted(drafter=drafter, budget=FixedBudget()) if make == "grpo" else None
        model.save_pretrained(tmp_path / "reference")  # where TRL takes it from, for a loss with `beta`
        model.config._name_or_path = str(tmp_path / "reference")
        trainer = GRPOTrainer(args=args, rollout_func=rollouts, **parts)
        if args.beta:
            step_in_place(model)  # away from the reference
        if drafter is None or make == "grpo":
            trainer.train()
        else:
            with emssd.speculate(trainer.model, tokenizer, drafter=drafter, budget=FixedBudget()) as speculation:
                trainer.train()
            assert speculation.engine is not None
            num_accepted[0] = speculation.engine.report.num_accepted
    timed = ("train_", "step_time", "total_flos")
    history = trainer.state.log_history
    logs = [{key: value for key, value in log.items() if not key.startswith(timed)} for log in history]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return logs, shown, weights, num_accepted[0]


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """The two trainings learned the same, and something."""
    assert one[:2] == other[:2]
    assert all(torch.equal(weight, like) for weight, like in zip(one[2], other[2], strict=True))
    assert any(log.get("grad_norm") for log in one[0])


@pytest.mark.parametrize(
    "options",
    [{"is_chat": True}, {"gradient_checkpointing": True, "bf16": False, "top_k": 9, "num_iterations": 2}],
)
@pytest.mark.parametrize("make", ["grpo", "online_dpo", "continuous_batching"])
def test_training_is_the_same_whatever_drafts(make: str, options: dict[str, Any], tmp_path: Path) -> None:
    if make == "online_dpo":
        options = {key: value for key, value in options.items() if key != "num_iterations"}
    without, drafted = (trained(tmp_path, make, drafter, **options) for drafter in ("none", REMEMBERS))
    assert_same(without, drafted)
    assert make == "online_dpo" or drafted[3] > 0
    assert len({str(texts) for texts in drafted[1]}) == len(drafted[1])


def test_training_is_that_of_continuous_batching_by_transformers_where_nothing_is_drawn(tmp_path: Path) -> None:
    """Equal texts have no advantage; what is learned is to be like the reference again."""
    small = {"num_blocks": 64, "max_batch_tokens": 64}
    options = {"bf16": False, "top_k": 1, "beta": 0.1, "max_steps": 2}
    options |= {"transformers_continuous_batching_config": small}
    alone, drafted = (trained(tmp_path, "continuous_batching", drafter, **options) for drafter in (None, REMEMBERS))
    assert_same(alone, drafted)
    assert drafted[3] > 0


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    assert trained["trainer"].state.global_step == 2
    weights, before = trained["trainer"].model.state_dict(), load_file(model_path("target") / "model.safetensors")
    assert any(not torch.equal(weights[name].float(), weight.float()) for name, weight in before.items())


def test_the_benchmark_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"question": f"{n} and {n} are", "answer": f"#### {2 * n}"}) for n in range(2)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    small = ["--questions", "2", "--epochs", "1", "--generations", "2", "--max-new-tokens", "8"]
    (run,) = main(["--model", str(save_model(tmp_path / "model")), "--data", "questions.jsonl", *small])
    assert run["same"]
    assert [len(rows) for rows in run["rows"].values()] == [1] * 5
    assert len(run["losses"]) == 1


@pytest.mark.parametrize("lora", [[], ["--lora"]])
def test_the_trainers_log_probabilities_have_the_bits_of_the_rollout(lora: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"{n} and {n} are", "answer": "4"}) for n in range(3)]
    (data := tmp_path / "questions.jsonl").write_text("\n".join(lines))
    small = ["--bits", "--questions-per-step", "1", "--epochs", "1", "--generations", "2", "--max-new-tokens", "8"]
    config = save_model(tmp_path / "model") / "config.json"  # with dropout, a trainer computes something else each time
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dropout": 0.0}))
    _, invariant = main(["--model", str(config.parent), "--data", str(data), *small, *lora])
    assert invariant["largest"] == 0.0
    assert invariant["tokens"] > 20
