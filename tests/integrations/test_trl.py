"""`Rollouts`: TRL's trainers learn the same whatever drafts, and sample from the model as it is now; nox -s trl."""

from __future__ import annotations

import json
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_cascade import CascadeConfig
from emssd_suffix import SuffixConfig
from emssd_testing.models import tiny_model
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel

import emssd
from emssd.data.demo import model_path
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError, PluginError
from emssd.integrations import installed
from emssd.integrations.trl import Rollouts
from emssd.sampling import SamplingParams
from tests.cli.conftest import CHAT_TEMPLATE, byte_tokenizer, save_model
from tests.support.sampling import sampled
from tests.support.tiers import looped

WHY = "TRL is not installed: nox -s trl, or pip install 'emssd[trl]'"
ROOT = Path(__file__).resolve().parents[2]
REMEMBERS = SuffixConfig(cache_tokens=10_000)
PROMPTS = ["the same words, the same words, the same", "hello hello", "12 12 12 12 12 12"]
NUM_NEW, NUM_SAMPLES = 16, 4


@pytest.fixture(autouse=True)
def some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL is not needed for what needs no trainer."""
    monkeypatch.setattr(installed, "version", lambda _: "1.16.0")


def make_model(architecture: str = "opt", **overrides: Any) -> Any:
    """A model in float64, in training, that repeats itself."""
    vocab_size = len(byte_tokenizer())
    model = tiny_model(architecture, vocab_size=vocab_size, max_model_len=96, std=0.12, **overrides)
    model.generation_config.eos_token_id = byte_tokenizer().eos_token_id
    return model.train()


def stand_in(model: Any, **options: Any) -> Any:
    """The part of a trainer that `Rollouts` uses."""
    tokenizer = byte_tokenizer()
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    config.update(**({"top_k": 0} | options))
    return SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped, device="cpu"),
        model_wrapped=model,
        processing_class=tokenizer,
        generation_config=config,
        use_vllm=False,
        use_transformers_continuous_batching=False,
        tools=None,
        _tokenize_prompts=lambda texts: (tokenizer(texts)["input_ids"], None, {}),
    )


def repeated(texts: list[str]) -> list[str]:
    """As `GRPOTrainer` hands them over: each as often as it is sampled."""
    return [text for text in texts for _ in range(NUM_SAMPLES)]


def plainly(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The text that Transformers generates from a prompt alone, without dropout."""
    model.eval()
    ids: torch.Tensor = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=byte_tokenizer().pad_token_id
    )
    model.train()
    return ids[0, len(prompt) :].tolist()


def step_in_place(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    ids = torch.arange(40).view(1, -1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("drafter", ["none", REMEMBERS])
def test_what_is_decoded_is_the_model_as_it_is_now(drafter: Any) -> None:
    """`test_ownership` tests other changes."""
    model = make_model()
    rollouts, trainer = Rollouts(drafter=drafter, budget=FixedBudget()), stand_in(model, do_sample=False)
    before = rollouts(PROMPTS, trainer)
    step_in_place(model)
    model.lm_head.eval()  # as a trainer may have it
    after = rollouts(PROMPTS, trainer)
    assert [name for name, each in model.named_modules() if not each.training] == ["lm_head"]
    assert after["completion_ids"] != before["completion_ids"]
    assert after["completion_ids"] == [plainly(model, ids) for ids in after["prompt_ids"]]


@pytest.mark.costly("compiles a model")
@pytest.mark.filterwarnings("error:the model runs without")
def test_a_compiled_rollout_copies_the_weights_as_they_are_now() -> None:
    model = make_model()
    model._original_forward, model.forward = model.forward, torch.autocast("cpu", torch.bfloat16)(model.forward)
    wrapped = model.forward  # as Accelerate leaves it
    rollouts, trainer = Rollouts(drafter=REMEMBERS, compile=True), stand_in(model, do_sample=False)
    before = rollouts(PROMPTS, trainer)
    step_in_place(model)
    after = rollouts(PROMPTS, trainer)
    assert model.forward is wrapped
    model.forward = model._original_forward
    del model._original_forward  # as it leaves it where there is no mixed precision
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that nothing is compiled
        assert rollouts(PROMPTS, trainer)["completion_ids"] == after["completion_ids"]
    del model.forward
    assert after["completion_ids"] != before["completion_ids"]
    assert after["completion_ids"] == [plainly(model, ids) for ids in after["prompt_ids"]]


def test_rows_are_samples_that_share_a_prompt_and_their_log_probabilities_are_those_of_what_was_drawn() -> None:
    model = make_model()
    rollouts, trainer = Rollouts(drafter=REMEMBERS), stand_in(model, temperature=0.7, top_k=5, repetition_penalty=1.2)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(3)
    found = rollouts(repeated(PROMPTS), trainer)
    assert rollouts.report is not None
    assert rollouts.report.num_adopted_tokens >= 32 * (NUM_SAMPLES - 1)
    params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2, seed=seed)
    model.eval()
    for row, (prompt, new, shares) in enumerate(zip(*found.values(), strict=True)):
        first, sample = row // NUM_SAMPLES * NUM_SAMPLES, row % NUM_SAMPLES
        eos = trainer.generation_config.eos_token_id
        assert tuple(new) == sampled(model, tuple(prompt), NUM_NEW, params, str(first), (eos,), sample)
        assert len(shares) == len(new)
        assert all(-5 < share <= 0 for share in shares)  # of five tokens each
    assert len({tuple(new) for new in found["completion_ids"]}) > len(PROMPTS)
    assert rollouts(repeated(PROMPTS), trainer) != found


def test_earlier_rollouts_are_drafted_from_if_the_drafter_remembers_texts() -> None:
    accepted = {}
    for name, drafter in {
        "remembers": CascadeConfig(drafters=["suffix"], options={"suffix": vars(REMEMBERS)}),
        "forgets": "suffix",
    }.items():
        rollouts, trainer = Rollouts(drafter=drafter, budget=FixedBudget()), stand_in(make_model(), do_sample=False)
        counts = []
        for _ in range(2):
            rollouts(PROMPTS, trainer)
            assert rollouts.report is not None
            counts.append(rollouts.report.num_accepted)
        accepted[name] = counts
    assert accepted["remembers"][1] > accepted["remembers"][0]
    assert accepted["forgets"][1] <= accepted["remembers"][0]


def test_a_drafter_on_the_targets_own_pages_drafts_from_the_rows_of_the_rollout() -> None:
    rollouts = Rollouts(drafter="self", budget=FixedBudget())
    for dtype in (torch.float64, torch.bfloat16):  # for the second, the engine is made again
        trainer = stand_in(make_model("llama").to(dtype), do_sample=False)
        rollouts(PROMPTS, trainer)
        assert rollouts.report is not None
        assert rollouts.report.num_accepted > 0


def test_within_generating_the_model_itself_decodes_so() -> None:
    model = make_model()
    trainer, rollouts = stand_in(model), Rollouts(drafter=REMEMBERS)
    ids = torch.tensor(byte_tokenizer()(PROMPTS[:1])["input_ids"])
    with rollouts.generating(trainer):
        new = model.generate(ids, do_sample=False, max_new_tokens=NUM_NEW)
    assert rollouts.report is not None
    assert new[0, ids.shape[1] :].tolist() == plainly(model, ids[0].tolist())
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"drafter": "sufix"}, PluginError, "did you mean 'suffix'"),
        ({"batch": 3}, ConfigError, "unknown option 'batch'.* takes batch_size"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Rollouts(**options)


@looped(
    ("changes", "sentence"),
    [
        ({"use_vllm": True}, "leave out use_vllm"),
        ({"tools": [print]}, "generate of its own"),
        ({"is_fsdp_enabled": True}, "train without FSDP"),
        ({"_tokenize_prompts": lambda texts: ([[5] * 90], None, {})}, "up to 106 tokens, and this model takes 96"),
        ({"_tokenize_prompts": lambda texts: ([[1]], ["image"], {})}, "have images"),
    ],
)
def test_trainers_that_cannot_be_served(changes: dict[str, Any], sentence: str) -> None:
    trainer = stand_in(make_model())
    vars(trainer).update(changes)
    with pytest.raises(ConfigError, match=sentence):
        Rollouts()(PROMPTS, trainer)


@pytest.mark.parametrize("kind", ["lora", "prompts"])
def test_adapters_decode_and_learned_prompts_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: nox -s trl")
    if kind == "prompts":
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(ConfigError, match="does not see the learned prompts of PROMPT_TUNING"):
            Rollouts()(PROMPTS, stand_in(peft.get_peft_model(make_model(), config)))
        return
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.3)
    plain, model = make_model(), peft.get_peft_model(make_model(), config).train()
    found = Rollouts()(PROMPTS, stand_in(model, do_sample=False))
    assert found["completion_ids"] == [plainly(model, ids) for ids in found["prompt_ids"]]
    assert found["completion_ids"] != [plainly(plain, ids) for ids in found["prompt_ids"]]


def trained(tmp_path: Path, make: str, prompts: list[Any], drafter: Any, **options: Any) -> tuple[Any, ...]:
    """The log of a trainer of TRL, the completions, its model's weights, and the accepted tokens of all rollouts."""
    pytest.importorskip("trl", reason=WHY)
    from datasets import Dataset

    shown: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        """The share of vowels."""
        shown.append(completions)
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [sum(letter in "aeiou" for letter in text) / NUM_NEW for text in texts]

    num_accepted = 0

    class Counted(Rollouts):
        def _run(self, *given: Any) -> Any:
            nonlocal num_accepted
            done = super()._run(*given)
            num_accepted += sum(row.num_accepted for row in done)
            return done

    rollouts, tokenizer = Counted(drafter=drafter, budget=FixedBudget()), byte_tokenizer()
    model = make_model(dropout=0.1)
    tokenizer.chat_template = CHAT_TEMPLATE
    data = Dataset.from_dict({"prompt": prompts})
    common = {
        "output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "max_steps": 3, "logging_steps": 1, "seed": 5,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, "temperature": 0.4, **options,
    }  # fmt: skip
    parts = {"model": model, "reward_funcs": reward, "train_dataset": data, "processing_class": tokenizer}
    if make != "online_dpo":
        from trl import GRPOConfig, GRPOTrainer

        continuous = make == "continuous_batching"
        sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": NUM_NEW}
        sizes |= {"use_transformers_continuous_batching": continuous}
        rollout_func = None if continuous else rollouts
        trainer = GRPOTrainer(args=GRPOConfig(**(sizes | common)), rollout_func=rollout_func, **parts)
        with emssd.speculate(model, tokenizer, drafter=drafter, budget=FixedBudget()) as speculation:
            trainer.train()
        if continuous:
            assert speculation.engine is not None
            num_accepted = speculation.engine.report.num_accepted
    else:
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        sizes = {"per_device_train_batch_size": 3, "max_new_tokens": NUM_NEW, "max_length": 96}
        trainer = OnlineDPOTrainer(args=OnlineDPOConfig(**(sizes | common)), **parts)
        with rollouts.generating(trainer):
            trainer.train()
    timed = ("train_", "step_time", "total_flos")
    history = trainer.state.log_history
    logs = [{key: value for key, value in log.items() if not key.startswith(timed)} for log in history]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return logs, shown, weights, num_accepted


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True, "bf16": False, "top_k": 9, "num_iterations": 2}]
)
@pytest.mark.parametrize("make", ["grpo", "online_dpo", "continuous_batching"])
def test_training_is_the_same_whatever_drafts(make: str, options: dict[str, Any], tmp_path: Path) -> None:
    if make == "online_dpo":
        options = {key: value for key, value in options.items() if key != "num_iterations"}
    logs, shown, weights, _ = trained(tmp_path, make, PROMPTS, "none", **options)
    others = trained(tmp_path, make, PROMPTS, REMEMBERS, **options)
    assert others[3] > 0
    assert (logs, shown) == others[:2]
    assert all(torch.equal(one, other) for one, other in zip(weights, others[2], strict=True))
    assert any(log.get("grad_norm") for log in logs)
    assert len({str(texts) for texts in shown}) == len(shown)


@pytest.mark.filterwarnings("ignore")
def test_messages_and_evaluation(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    logs, shown, *_ = trained(tmp_path, "grpo", chats, REMEMBERS, max_steps=1)
    assert shown[0][0][0]["role"] == "assistant"
    assert logs[0]["completions/max_length"] <= NUM_NEW


@pytest.mark.filterwarnings("ignore")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason=WHY)
    monkeypatch.chdir(tmp_path)
    trained = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    assert trained["trainer"].state.global_step == 2
    weights, before = trained["trainer"].model.state_dict(), load_file(model_path("target") / "model.safetensors")
    assert any(not torch.equal(weights[name].float(), weight.float()) for name, weight in before.items())


@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason=WHY)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # as the program does when it is imported
    from benchmarks.trl_rollouts import main

    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"question": f"{n} and {n} are", "answer": f"#### {2 * n}"}) for n in range(2)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    small = ["--questions", "2", "--epochs", "1", "--generations", "2", "--max-new-tokens", "8"]
    (run,) = main(["--model", str(save_model(tmp_path / "model")), "--data", "questions.jsonl", *small])
    assert run["same"]
    assert [len(rows) for rows in run["rows"].values()] == [1] * 5
    assert len(run["losses"]) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [[], ["--lora"]])
def test_the_trainers_log_probabilities_have_the_bits_of_the_rollout(lora: list[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason=WHY)
    from benchmarks.trl_rollouts import main

    lines = [json.dumps({"question": f"{n} and {n} are", "answer": "4"}) for n in range(3)]
    (data := tmp_path / "questions.jsonl").write_text("\n".join(lines))
    small = ["--bits", "--questions-per-step", "1", "--epochs", "1", "--generations", "2", "--max-new-tokens", "8"]
    config = save_model(tmp_path / "model") / "config.json"  # with dropout, a trainer computes something else each time
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dropout": 0.0}))
    _, invariant = main(["--model", str(config.parent), "--data", str(data), *small, *lora])
    assert invariant["largest"] == 0.0
    assert invariant["tokens"] > 20
