"""`emssd-plugins inspect`, which says what a checkpoint is, and the example that makes a Llama of Baichuan's models."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing.authoring import main
from emssd_testing.authoring.inspect import inspect
from emssd_testing.models import tiny_model
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from tests.support.heads import layer_weights, random_weights, write_head

CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 17,
}
SHAPES = {"fc.weight": (8, 24), "norm.weight": (8,), "hidden_norm.weight": (8,)} | layer_weights("layers.0.", CONFIG, 8)
BLOCK = CONFIG | {"dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 1, 2]}}
EAGLE3 = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}
WEIGHTS = random_weights(SHAPES)


def without(*names: str) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in WEIGHTS.items() if not any(part in name for part in names)}


def container(kind: str, **layers: Any) -> dict[str, Any]:
    values = {"model_type": "qwen3"} | CONFIG | layers
    return {"speculators_model_type": kind, "speculators_version": "0.9.0", "transformer_layer_config": values}


def test_a_whole_checkpoint_is_described_in_five_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = container("dflash") | {"block_size": 4, "mask_token_id": 3, "aux_hidden_state_layer_ids": [1, 2, 3]}
    config["speculators_config"] = {"verifier": {"name_or_path": "a/target"}}
    path = write_head(tmp_path / "head", config, WEIGHTS)
    main(["inspect", path])
    what, drafts, trained, weights, missing = capsys.readouterr().out.splitlines()
    assert what == ("what it is: a DFlash drafter, which drafts blocks, dflash in a container of speculators 0.9.0")
    assert drafts == f"drafts with: drafter=dflash drafter.path={path}"
    assert trained == "trained for: a/target, hidden size 8, vocabulary 17"
    numbers = sum(weight.numel() for weight in WEIGHTS.values())
    assert weights == f"weights: {len(WEIGHTS)} tensors, {numbers:,} numbers, float32; read from model.safetensors"
    assert missing == "missing: nothing that can be told without the target"


@pytest.mark.parametrize(
    ("config", "more", "drafter"),
    [
        (EAGLE3, {"d2t": torch.zeros(3, dtype=torch.int64)}, "eagle3"),
        (CONFIG, {}, "eagle"),
        (BLOCK, {}, "dflash"),
        (container("peagle") | {"mask_token_id": 3}, {"mask_hidden": torch.zeros(1, 1, 24)}, "eagle3"),
        (CONFIG, {"0.0.linear.weight": torch.zeros(8, 8)}, "medusa"),
        (CONFIG, {"hydra_mlp.0.0.linear.weight": torch.zeros(8, 8)}, "hydra"),
        (CONFIG | {"pard_token": 3}, {}, "pard"),
        (container("mtp"), {"mtp_layers.0.input_proj.weight": torch.zeros(8, 16)}, "mtp"),
    ],
    ids=["eagle3", "eagle", "dflash", "peagle", "medusa", "hydra", "pard", "mtp"],
)
def test_the_drafter_that_reads_it_is_named(config: Any, more: Any, drafter: str, tmp_path: Path) -> None:
    lines, usable = inspect(write_head(tmp_path / "head", config, WEIGHTS | more))
    assert len(lines) == 5
    assert lines[1].startswith(f"drafts with: drafter={drafter} ")
    assert usable


def damaged(config: Any, weights: Any = WEIGHTS, change: Callable[[Path], object] = bool) -> Any:
    return config, weights, change


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


DAMAGED: dict[str, tuple[Any, str]] = {
    "no config": (damaged(EAGLE3, change=lambda f: (f / "config.json").unlink()), "config.json is missing"),
    "a cut file": (damaged(EAGLE3, change=truncated), "cannot load the trained head"),
    "an unknown container": (damaged(container("next")), "no installed drafter reads it"),
    "unknown layers": (damaged(container("eagle3", model_type="mamba")), "its layers are those of mamba"),
    "a word for a size": (damaged(container("dflash", hidden_size="wide")), "Transformers does not take"),
    "a word for layers": (damaged(EAGLE3 | {"num_hidden_layers": "two"}), "a value of another type or size"),
    "no block size": (damaged(BLOCK | {"dflash_config": {"mask_token_id": 3}}), "missing: block_size in config.json"),
    "a number for an object": (damaged(BLOCK | {"dflash_config": 3}), "a value of another type or size"),
    "no fc": (damaged(BLOCK, without("fc.")), "missing: fc.weight"),
    "no queries": (damaged(BLOCK, without("q_proj")), "missing: layers.0.self_attn.q_proj.weight"),
    "a layer too few": (damaged(BLOCK | {"num_hidden_layers": 2}), "layers.1.self_attn.q_proj.weight"),
    "no mask": (damaged(container("peagle"), WEIGHTS), "mask_token_id in config.json, mask_hidden"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_gives_a_sentence(name: str, tmp_path: Path) -> None:
    (config, weights, change), words = DAMAGED[name]
    path = write_head(tmp_path / "head", config, weights)
    change(tmp_path / "head")
    lines, usable = inspect(path)
    assert not usable
    assert len(lines) in (1, 5)
    assert words in " ".join(lines)
    with pytest.raises(SystemExit, match="1"):
        main(["inspect", path])


def test_a_file_and_a_path_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOCK))
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert inspect(str(tmp_path / "model.safetensors"))[1]
    assert "there is no such folder or file" in inspect(str(tmp_path / "none"))[0][0]


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "baichuan_to_llama.py"


@pytest.mark.parametrize(("vocab_size", "suffix"), [(64000, "safetensors"), (125696, "bin")], ids=["1", "2"])
def test_its_logits_are_those_of_the_checkpoint(
    vocab_size: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama: Any = tiny_model("llama", num_key_value_heads=4, tie_word_embeddings=False)
    weights = {name: weight.clone() for name, weight in llama.state_dict().items()}
    for layer in range(llama.config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        parts = [weights.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        weights[f"{attention}W_pack.weight"] = torch.cat(parts)
    source, made = tmp_path / "baichuan", tmp_path / "llama"
    source.mkdir()
    config = llama.config.to_dict() | {
        "vocab_size": vocab_size,
        "model_type": "baichuan",
        "auto_map": {"AutoModel": "x"},
    }
    (source / "config.json").write_text(json.dumps(config))
    if suffix == "bin":
        torch.save(weights, source / "pytorch_model.bin")
    else:
        save_file(weights, source / "model.safetensors")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(source), str(made)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")

    written = json.loads((made / "config.json").read_text())
    assert "auto_map" not in written
    (made / "config.json").write_text(json.dumps(written | {"vocab_size": llama.config.vocab_size}))
    model: Any = LlamaForCausalLM.from_pretrained(made, dtype=torch.float64)
    if vocab_size == 125696:  # Baichuan2's NormHead
        llama.lm_head.weight.data = torch.nn.functional.normalize(llama.lm_head.weight.data)
    tokens = torch.tensor([[3, 5, 4, 7, 6]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, llama(tokens).logits, rtol=0, atol=1e-12)


def test_those_of_13b_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 5120}')
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path), str(tmp_path / "made")])
    with pytest.raises(SystemExit, match="ALiBi"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not (tmp_path / "made").exists()
