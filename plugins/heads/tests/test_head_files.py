"""The parts of trained heads: rotary positions are those of Transformers, and configs say what they mean."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_heads import LayerHead
from emssd_heads.config import DecoderConfig, TargetSizes
from emssd_heads.files import Checkpoint, read_checkpoint
from emssd_heads.formats import Format, detect, expect
from emssd_heads.layers import Rotary
from emssd_heads.loading import HeadFiles
from emssd_heads.states import KnownStates
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from emssd.attention import KVCacheSpec
from emssd.errors import ConfigError, OutOfMemoryError
from tests.support.heads import CPU, write_head
from tests.support.tiers import looped

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@looped(
    "values",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"head_dim": 12},
    ],
)
def test_rotary_angles_are_those_of_transformers(values: dict[str, Any]) -> None:
    positions = torch.tensor([[0, 1, 7, 100]])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **values))(torch.zeros(1), positions)
    config = DecoderConfig.read(SIZES | values, "x")
    with torch.device("meta"):
        rotary = Rotary(config)
    for is_, wanted in zip(rotary(positions, torch.float32), theirs, strict=True):
        torch.testing.assert_close(is_.squeeze(2), wanted, rtol=1e-6, atol=1e-6)


def test_windows_are_of_the_layers_that_slide() -> None:
    values = SIZES | {"num_hidden_layers": 3, "sliding_window": 7}
    assert DecoderConfig.read(values, "x").windows == (None, None, None)
    types = {"layer_types": ["full_attention", "sliding_attention"]}  # fewer than layers, as when copied from another
    assert DecoderConfig.read(values | types, "x").windows == (None, 7, None)


def test_the_cache_of_a_head_is_no_longer_than_it_can_be_used() -> None:
    dynamic = SIZES | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert DecoderConfig.read(dynamic, "x").max_len == 2048
    target = KVCacheSpec((), torch.float64, CPU, 2, 64, prefix_caching=True)
    head = LayerHead(DecoderConfig.read(SIZES, "x"), ())
    assert head.kv_cache_spec(target) == KVCacheSpec(head.specs, torch.float64, CPU, 2, 64)
    short = LayerHead(DecoderConfig.read(dynamic | {"max_position_embeddings": 8}, "x"), ())
    assert short.kv_cache_spec(target).max_model_len == 8


def test_no_room_for_the_weights_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint("x", None, {}, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})  # type: ignore[arg-type]
    files = HeadFiles(checkpoint, TargetSizes(2, 2, 1), {"weight": "weight", "bias": "bias"})
    monkeypatch.setattr(torch.nn.Linear, "to", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(OutOfMemoryError, match="cpu has no room for the trained head 'x'"):
        files.filled(lambda: torch.nn.Linear(2, 2))


ONE = {"fc.weight": torch.arange(6.0).view(2, 3)}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt"])
def test_folders_and_files_are_read(file: str, tmp_path: Path) -> None:
    write_head(tmp_path, {"a": 1}, ONE, file)
    for path in (tmp_path, tmp_path / file):
        found = read_checkpoint(str(path))
        assert found.config == {"a": 1}
        assert found.source.name == file
        assert torch.equal(found.tensors["fc.weight"], ONE["fc.weight"])


def test_shards_are_read_together(tmp_path: Path) -> None:
    write_head(tmp_path, {}, ONE, "pytorch_model-1.bin")
    write_head(tmp_path, {}, {"b": torch.ones(2)}, "pytorch_model-2.bin")
    index = {"weight_map": {"fc.weight": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert set(read_checkpoint(str(tmp_path)).tensors) == {"fc.weight", "b"}
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model-2.bin is no file"):
        read_checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no weight_map"):
        read_checkpoint(str(tmp_path))


def test_old_files_of_pytorch_are_read(tmp_path: Path) -> None:
    write_head(tmp_path, {}, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(ONE, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(str(tmp_path)).tensors["fc.weight"], ONE["fc.weight"])


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_code_in_a_pickle_is_not_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path, {}, ONE | {"x": Harmful()}, file)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="may run any code") as raised:
        read_checkpoint(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "harm").exists()


def test_what_is_missing_or_damaged_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(path: Path | str = tmp_path) -> str:
        with pytest.raises(ConfigError) as raised:
            read_checkpoint(str(path))
        return str(raised.value)

    assert "has no file of weights" in refusal()
    save_file(ONE, tmp_path / "model.safetensors")
    assert "config.json is missing" in refusal()
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal()
    for content in (b"{", b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        assert "cannot be read as JSON" in refusal()
    (tmp_path / "config.json").write_text("{}")
    assert "it is no file of weights" in refusal(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    assert "is damaged or not complete" in refusal()
    (tmp_path / "model.safetensors").unlink()
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    assert "is no dictionary of tensors" in refusal()
    assert "there is no such folder or file" in refusal(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the Hugging Face hub does not give it" in refusal("nobody/nothing-of-this-name")


def test_heads_of_the_hub_are_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--head"
    write_head(repository / "snapshots" / ("0" * 40), {"a": 1}, ONE)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert read_checkpoint("some/head").config == {"a": 1}


LAYER = {"layers.0.self_attn.q_proj.weight": torch.ones(1), "layers.0.mlp.up_proj.weight": torch.ones(1)}


@looped(
    ("config", "names", "file", "found"),
    [
        ({"speculators_model_type": "eagle3"}, {}, "model.safetensors", Format.eagle3),
        ({"speculators_model_type": "dspark"}, {}, "model.safetensors", Format.dflash),
        ({"speculators_model_type": "xpress"}, {}, "model.safetensors", Format.dflash),
        ({"speculators_model_type": "dflash9"}, {}, "model.safetensors", Format.speculators),
        ({}, {"0.0.linear.weight"}, "medusa_lm_head.pt", Format.medusa),
        ({}, {"medusa_head.0.0.linear.weight", *LAYER}, "model.safetensors", Format.medusa),
        ({}, {"blocks.0.layers.0.weight", "lm_heads.0.weight"}, "model.safetensors", Format.medusa),
        ({}, {"hydra_mlp.0.0.linear.weight"}, "hydra_lm_head.pt", Format.hydra),
        ({"dflash_config": {}}, {"fc.weight", "hidden_norm.weight", *LAYER}, "model.safetensors", Format.dflash),
        ({"architectures": ["DFlashDraftModel"]}, {"fc.weight", *LAYER}, "model.safetensors", Format.dflash),
        ({"pard_token": 3}, {"mask_hidden", "fc.weight"}, "model.safetensors", Format.peagle),
        ({"pard_token": 3}, {*LAYER}, "model.safetensors", Format.pard),
        ({}, {"midlayer.hidden_norm.weight", "fc.weight"}, "pytorch_model.bin", Format.eagle3),
        ({}, {"model.layers.0.hidden_norm.weight", "model.fc.weight"}, "model.safetensors", Format.eagle3),
        ({}, {"d2t", "fc.weight", *LAYER}, "model.safetensors", Format.eagle3),
        ({}, {"fc.weight", *LAYER}, "pytorch_model.bin", Format.eagle),
        ({}, {"layers.0.self_attn.q_proj.weight", "norm.weight"}, "pytorch_model.bin", Format.kangaroo),
        ({}, {"mtp.fc.weight", "embed_tokens.weight", "norm.weight", *LAYER}, "model.safetensors", Format.mtp),
        ({}, {"model.norm.weight", "model.layers.7.eh_proj.weight", *LAYER}, "model.safetensors", Format.mtp),
        ({}, {"model.embed_tokens.weight", "model.norm.weight", *LAYER}, "model.safetensors", Format.causal_lm),
    ],
)
def test_formats_are_told_apart(config: dict[str, Any], names: set[str], file: str, found: Format) -> None:
    checkpoint = Checkpoint("x", Path(file), config, dict.fromkeys(names, torch.ones(1)))
    assert detect(checkpoint) is found
    expect(checkpoint, found)
    other = Format.medusa if found is not Format.medusa else Format.eagle
    with pytest.raises(ConfigError, match=f"what it holds is {found.value}; what is wanted is {other.value}"):
        expect(checkpoint, other)


def states_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None].double()


def test_hidden_states_are_kept_until_they_are_used() -> None:
    known = KnownStates()

    def add(start: int, states: torch.Tensor) -> None:
        known.wait(start, states)
        known.made(states)

    assert not known.covers(0)
    add(0, states_of(0, 1))
    add(2, states_of(2))
    assert known.covers(3)
    assert not known.covers(4)
    assert known.new(3).flatten().tolist() == [0, 1, 2]
    assert known.new(3).flatten().tolist() == [0, 1, 2]  # it failed, and is tried again
    known.used(3)
    assert known.new(3).flatten().tolist() == [2]
    add(3, states_of(3, 4))
    add(5, states_of(5))
    assert known.new(6).flatten().tolist() == [3, 4, 5]
    known.used(known.stop)
    add(6, states_of(6, 7))
    add(8, states_of(8))
    known.used(8)
    assert (known.start, known.new(9).flatten().tolist()) == (7, [8])
    with pytest.raises(AssertionError, match="from position 8 on, and those before end at 9"):
        add(8, states_of(8))
