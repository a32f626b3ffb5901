"""A checkpoint is loaded whole and without foreign code, or refused with one sentence that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_testing.models import tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, dynamic_module_utils

from emssd import Engine
from emssd.errors import ConfigError
from emssd.model import ModelOptions, load_model

WEIGHTS = "model.safetensors"
OPTIONS: dict[str, Any] = {"drafter": "none", "device": "cpu"}


def save_checkpoint(folder: Path, architecture: str = "llama", **overrides: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(13)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_model(architecture, vocab_size=13, dtype=torch.float32, **overrides).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w1", unk_token="w3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("untouched"), tie_word_embeddings=False)
    for left_over in ("training_args.bin", "consolidated.safetensors"):  # nobody reads them
        (folder / left_over).write_bytes(b"not for us")
    return folder


@pytest.fixture
def folder(untouched: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(untouched, tmp_path / "model"))


def change(name: str, folder: Path, **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    """Puts a tensor into the file of weights; without a shape, takes it out."""

    def change(folder: Path) -> None:
        weights = {key: weight for key, weight in load_file(folder / WEIGHTS).items() if key != name}
        weights |= {name: torch.ones(shape)} if shape else {}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def write(name: str, content: str | bytes, folder: Path, *, without: str = "nothing") -> None:
    (folder / without).unlink(missing_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, folder: Path, share: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])


def remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


class Malice:
    """A pickle that does harm when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the checkpoint ran",)


def pickle_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"lm_head.weight": Malice()}, folder / "pytorch_model.bin")


INDEX = "model.safetensors.index.json"
CONFIG, GENERATION = partial(change, "config.json"), partial(change, "generation_config.json")
TOKENIZER = partial(change, "tokenizer_config.json")
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut off": (partial(cut, WEIGHTS, share=0.5), r"/model\.safetensors is damaged or not complete \(.*again"),
    "no weights": (partial(remove, WEIGHTS), r"no file named model\.safetensors.*\. Give a local"),
    "weights a folder": (lambda folder: (remove(WEIGHTS, folder), (folder / WEIGHTS).mkdir()), "is no file"),
    "pickle": (pickle_weights, r"/pytorch_model\.bin is damaged, or holds Python objects .* any code"),
    "index": (partial(write, INDEX, "{", without=WEIGHTS), rf"/{INDEX} is not valid JSON"),
    "index of no map": (partial(write, INDEX, '{"weight_map": [1]}', without=WEIGHTS), rf"/{INDEX} has no weight_map"),
    "a shard is missing": (
        partial(write, INDEX, '{"metadata": {}, "weight_map": {"a": "part-2.safetensors"}}', without=WEIGHTS),
        rf"/part-2\.safetensors is missing, which {INDEX} names",
    ),
    "more layers": (partial(CONFIG, num_hidden_layers=3), r": model\.layers\.2\.input_l.*, .* and 6 more are missing"),
    "layers without tensors": (partial(CONFIG, num_hidden_layers=10**9), r"says 1000000000 layers, .* have \d+ byte"),
    "a tied head of another shape": (
        lambda folder: (
            CONFIG(folder, tie_word_embeddings=True),
            with_tensor("lm_head.weight", 14, 32)(folder),
        ),
        r"lm_head\.weight \(14x32 in place of 13x32\) have another shape",
    ),
    "an adapter": (
        lambda folder: (
            remove(WEIGHTS, folder),
            write("adapter_config.json", '{"base_model_name_or_path": "org/base"}', folder, without="config.json"),
        ),
        r"it holds an adapter of PEFT for org/base; .*merge_and_unload\(\)\.save_pretrained\(FOLDER\)",
    ),
    "other shapes": (partial(CONFIG, intermediate_size=64), r"mlp\.down_proj\.weight \(32x48 in place of 32x64\), "),
    "a tensor is missing": (with_tensor("model.norm.weight"), r": model\.norm\.weight are missing\. Bring"),
    "a tensor too many": (with_tensor("model.layers.1.bias", 3), r": model\.layers\.1\.bias have no place"),
    "no config": (partial(remove, "config.json"), r"there is no config\.json in it"),
    "config no JSON": (partial(write, "config.json", "{"), r"/config\.json is not valid JSON \(.*again"),
    "config no text": (partial(write, "config.json", b"\xff\xfe\x00"), r"/config\.json is not valid JSON"),
    "config a list": (partial(write, "config.json", "[]"), r"/config\.json holds no JSON object"),
    "config too deep": (partial(write, "config.json", "[" * 9**5), r"/config\.json is not valid JSON"),
    "text for a number": (partial(CONFIG, num_hidden_layers="two"), r"config\.json .*'num_hidden_layers' expected int"),
    "no heads": (partial(CONFIG, num_attention_heads=0), r"config\.json is none .*ZeroDivisionError"),
    "unknown activation": (partial(CONFIG, hidden_act="swish9"), r"make the model of its config\.json.*'swish9'"),
    "unknown model type": (partial(CONFIG, model_type="novel"), "config.json is none .*model type `novel`"),
    "generation no JSON": (partial(write, "generation_config.json", "{"), r"/generation_config\.json is not valid"),
    "EOS in a list in a list": (partial(GENERATION, eos_token_id=[[1]]), r"eos_token_id is \[\[1\]\]; it must be"),
    "EOS a text": (partial(GENERATION, eos_token_id="w2"), r"eos_token_id is 'w2'; it must be"),
    "tokenizer no JSON": (partial(write, "tokenizer.json", "{"), r"/tokenizer\.json is not valid JSON"),
    "tokenizer of nothing": (partial(write, "tokenizer.json", "{}"), "its tokenizer is none that Transformers"),
    "no vocabulary": (partial(remove, "tokenizer.json"), "its tokenizer is missing: .*/model; save"),
    "tokenizer config list": (partial(write, "tokenizer_config.json", "[]"), r"/tokenizer_config\.json holds no JSON"),
    "tokenizer of class 3": (partial(TOKENIZER, tokenizer_class=3), "its tokenizer is none .*AttributeError"),
    "special tokens": (partial(write, "special_tokens_map.json", "{"), r"/special_tokens_map\.json is not valid JSON"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_is_told_in_one_line_with_what_is_broken(
    what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    break_it, message = BROKEN[what]
    break_it(folder)
    with pytest.raises(ConfigError, match=message) as refusal:
        Engine.from_pretrained(str(folder), **OPTIONS)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600
    printed = capfd.readouterr()
    assert "LOAD REPORT" not in printed.err  # a table about what the sentence says
    assert "code of the checkpoint ran" not in printed.out


@pytest.mark.parametrize(
    "method",
    ["awq", "bitsandbytes", "compressed-tensors", "eetq", "fbgemm_fp8", "gptq", "quanto", "torchao", "a new one"],
)
def test_a_quantised_folder_is_refused_before_its_weights_are_read(method: str, folder: Path) -> None:
    """Where its package is not installed."""
    CONFIG(folder, quantization_config={"quant_method": method, "load_in_4bit": method == "bitsandbytes"})
    remove(WEIGHTS, folder)
    with pytest.raises(ConfigError, match=rf"format {method}, which cannot be used here .*give a dense") as told:
        Engine.from_pretrained(str(folder), **OPTIONS)
    assert len(str(told.value).replace(str(folder), "")) < 600


def test_the_same_checkpoint_unbroken_is_served(untouched: Path) -> None:
    (generation,) = Engine.from_pretrained(str(untouched), **OPTIONS).generate(["w4"], 3)
    assert generation.text is not None


@pytest.mark.parametrize("architecture", ["opt", "llama", "gemma2", "gpt2"])
def test_tied_weights_are_in_the_file_once_and_not_missing(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    load_model(ModelOptions(str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    ],
)
def test_what_older_versions_stored_and_newer_ones_compute_may_be_left_over(
    architecture: str, name: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture)
    with_tensor(name, 4)(folder)
    load_model(ModelOptions(str(folder), device="cpu"))


@pytest.mark.parametrize("level", ["WARNING", "CRITICAL"])
def test_experts_that_cannot_be_put_together_are_named(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers stacks them while it loads, and its error refers to a table, which the user may have silenced."""
    caplog.set_level(level, "transformers")
    folder = save_checkpoint(tmp_path, "mixtral", num_hidden_layers=1, num_local_experts=2)
    with_tensor("model.layers.0.block_sparse_moe.experts.1.w1.weight")(folder)
    missing = r"model\.layers\.0\.mlp\.experts\.gate_up_proj are made of is missing in part"
    with pytest.raises(ConfigError, match=missing):
        load_model(ModelOptions(str(folder), device="cpu"))


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "qwen2", "gemma2", "gpt_neox", "mistral"])
def test_a_missing_tokenizer_is_no_empty_one(architecture: str, tmp_path: Path) -> None:
    """Of some types Transformers makes one that knows its special tokens alone, and every prompt would be empty."""
    tiny_model(architecture).save_pretrained(tmp_path)
    missing = rf"its tokenizer is missing: .* is in {tmp_path}; .*tokenizer\.save_pretrained"
    with pytest.raises(ConfigError, match=missing):
        load_model(ModelOptions(str(tmp_path)))


CODE = """
print("code of the checkpoint ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class MyConfig(LlamaConfig):
    model_type = "mine"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL_CODE = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
TOKENIZER_CODE = {"AutoTokenizer": [None, "mine.MyTokenizer"]}


@pytest.fixture
def with_code(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint that brings code; whoever is asked whether to run it says yes."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    (folder / "mine.py").write_text(f"# {tmp_path}{CODE}")  # its own, as modules of the same text are kept
    return folder


@pytest.mark.parametrize("part", ["model", "tokenizer"])
@pytest.mark.parametrize("role", ["target", "draft model"])
def test_code_of_the_checkpoint_is_not_run_unless_it_is_trusted(
    part: str, role: str, with_code: Path, untouched: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if part == "model":
        CONFIG(with_code, model_type="mine", auto_map=MODEL_CODE)
    else:
        TOKENIZER(with_code, tokenizer_class="MyTokenizer", auto_map=TOKENIZER_CODE)
    options: dict[str, Any] = {"path": str(with_code), **OPTIONS}
    if role == "draft model":
        options |= {"path": str(untouched), "drafter": DraftModelConfig(str(with_code))}
        with pytest.raises(ConfigError, match="needs code that comes with"):
            Engine.from_model(tiny_model(vocab_size=13), drafter=options["drafter"])
    untrusted = r"needs code that comes with .*model\.trust_remote_code=true .*runs that code"
    with pytest.raises(ConfigError, match=untrusted):
        Engine.from_pretrained(**options)
    assert "code of the checkpoint ran" not in capfd.readouterr().out
    engine = Engine.from_pretrained(**options, trust_remote_code=True)
    assert "code of the checkpoint ran" in capfd.readouterr().out
    expected = Engine.from_pretrained(str(untouched), **OPTIONS).generate(["w4", "w5 w6"], 5)
    assert [row.token_ids for row in engine.generate(["w4", "w5 w6"], 5)] == [row.token_ids for row in expected]
