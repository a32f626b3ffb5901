"""Layers on several devices: what goes where, with devices as data; and the tokens are those of one device."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_padded import PaddedConfig
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import KVCacheSpec, LayerSpec, pool, spread
from emssd.attention.spread import SpreadBackend, free_for, parts_of
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack_nodes
from emssd.errors import ConfigError, PluginError, UnsupportedModelError
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, ModelOptions, TargetModel, load_model
from tests.support.tiers import looped

accelerate = pytest.importorskip("accelerate", reason="model.device_map needs accelerate, an extra of emssd")

CPU, META = torch.device("cpu"), torch.device("meta")
OTHER = torch.device("cpu", 0)  # the same memory by another name, so that the parts of a cache can be run here
PROMPTS = [[1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9], [1, 4, 4, 4, 4, 4, 4, 4, 4], [1, 3, 8, 3, 8, 3]]
NARROW, WIDE = LayerSpec(4, 2, 8, 8, 0.35), LayerSpec(4, 4, 16, 8, 0.25)
SPEC = KVCacheSpec((NARROW, WIDE, NARROW), torch.float64, CPU, 4, 64, prefix_caching=True, devices=(META, CPU, META))


def hooked(architecture: str) -> Any:
    """A model whose modules have Accelerate's hooks, all on the CPU."""
    model = tiny_model(architecture)
    names = {name: "cpu" for name, module in model.named_modules() if name and name.count(".") < 2}
    return accelerate.dispatch_model(model, names, force_hooks=True)


def test_the_layers_of_a_cache_are_parted_by_device() -> None:
    parts = parts_of(SPEC)
    assert {device: layers for device, (layers, _) in parts.items()} == {META: (0, 2), CPU: (1,)}
    for device, (layers, part) in parts.items():
        expected = tuple(SPEC.layers[layer] for layer in layers)
        assert part == replace(SPEC, layers=expected, device=device, devices=(), prefix_caching=False)
    assert sum(part.bytes_per_token() for _, part in parts.values()) == SPEC.bytes_per_token()


def test_the_device_with_the_least_room_for_its_layers_limits_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "free_bytes", lambda device: {META: 10_000, CPU: 1_000_000}[device])
    on_meta = parts_of(SPEC)[META][1].bytes_per_token()
    assert free_for(SPEC) == 10_000 * SPEC.bytes_per_token() // on_meta
    assert pool.kv_bytes("0.5", CPU, lambda: free_for(SPEC)) == free_for(SPEC) // 2
    assert pool.kv_bytes("5KB", CPU, lambda: free_for(SPEC)) == 5000


@pytest.mark.parametrize("name", ["ragged", "padded"])
def test_kv_and_the_tensors_of_a_step_lie_on_the_device_of_the_layer(name: str) -> None:
    choice = name if name == "ragged" else PaddedConfig(pad_inputs=False)
    backend = make_backend(replace(SPEC, prefix_caching=False), choice, Registry())
    assert isinstance(backend, SpreadBackend)
    plan = backend.plan(pack_nodes(["a"], torch.tensor([3, 1, 4]), [3], [3]))
    plan.attention[META].attention.watch.trusts = True  # else it would look at results, and there are none
    assert {*plan.attention} == {META, CPU}
    for device, part in plan.attention.items():
        assert {tensor.device for tensor in tensors(part)} == {device}
    assert {tensor.device for tensor in tensors(replace(plan, attention=None))} == {CPU}
    for layer, (spec, device) in enumerate(zip(SPEC.layers, SPEC.devices, strict=True)):
        query = torch.zeros(3, 4, spec.key_dim, dtype=torch.float64, device=device)
        key = query[:, : spec.num_kv_heads]
        out = backend.forward(plan, layer, query, key, key[..., : spec.value_dim])
        assert (out.device, out.shape) == (device, (3, 4, spec.value_dim))


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in the fields of a dataclass, and of what those hold."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    names = [name for base in type(value).__mro__ for name in getattr(base, "__dataclass_fields__", ())]
    return [tensor for name in dict.fromkeys(names) for tensor in tensors(getattr(value, name))]


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize(("architecture", "drafter"), [("gemma2", "lookahead"), ("opt", "llma"), ("llama", "none")])
def test_two_devices_give_the_tokens_of_one(
    architecture: str, drafter: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emssd.model.run.target.layer_devices", lambda target: (OTHER, CPU))
    expected = [greedy_reference(tiny_model(architecture), prompt, 16, {2}) for prompt in PROMPTS]
    engine = Engine.from_model(hooked(architecture), drafter=drafter, backend=backend, batch_size=3)
    assert isinstance(engine.runner.backend, SpreadBackend)
    assert [list(row.token_ids) for row in engine.generate(PROMPTS, 16)] == expected


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "mistral", "phi", "qwen3_5_text"])
def test_hooks_and_weights_that_come_when_they_are_used_change_no_token(architecture: str) -> None:
    expected = [greedy_reference(tiny_model(architecture), prompt, 16, {2}) for prompt in PROMPTS]
    offloaded = accelerate.cpu_offload(tiny_model(architecture), execution_device=CPU)
    assert all(weight.is_meta for weight in offloaded.parameters())
    for model in (hooked(architecture), offloaded):
        engine = Engine.from_model(model, drafter="llma", batch_size=3)
        assert (engine.target.is_spread, engine.target.devices) == (True, ())
        assert [list(row.token_ids) for row in engine.generate(PROMPTS, 16)] == expected


def test_drafters_borrow_across_hooks_what_they_borrow_of_one_device() -> None:
    plain, spread_over = (BorrowedTarget(TargetModel(model)) for model in (tiny_model("gemma2"), hooked("gemma2")))
    ids = torch.tensor([3, 1, 4])
    with torch.inference_mode():
        for raw in (True, False):
            assert torch.equal(spread_over.embed(ids, raw=raw), plain.embed(ids, raw=raw))
        hidden = plain.embed(ids)
        assert torch.equal(spread_over.norm(hidden), plain.norm(hidden))
        assert torch.equal(spread_over.project(hidden), plain.project(hidden))
        assert torch.equal(spread_over.logits(ids), plain.logits(ids))


@pytest.mark.parametrize("device_map", ["auto", {"model": "cpu", "lm_head": "cpu"}])
def test_a_loaded_model_decodes_as_ever(device_map: Any, tmp_path: Path) -> None:
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto takes the GPU here; tests/gpu compares that")
    plain = Engine.from_pretrained("demo", drafter="none", device="cpu")
    engine = Engine.from_pretrained("demo", drafter="none", device_map=device_map, compile="auto")
    assert engine.target.compiled is None
    ours, expected = (one.generate([[5, 6, 7, 5, 6]], 8)[0].token_ids for one in (engine, plain))
    assert ours == expected


@looped(
    ("options", "message"),
    [
        ({"device_map": "split"}, "choose auto, balanced, balanced_low_0, sequential, or give a device for each"),
        ({"device_map": {}}, "it must be a word or a map from modules to devices"),
        ({"device_map": {"model": "disk"}}, "puts 'model' on disk, and emssd computes with weights that are in memory"),
        ({"device_map": {"model": "meta"}}, "puts 'model' on meta"),
        ({"device_map": {"model": 99}}, "puts 'model' on 99, and this machine has"),
        ({"device_map": {"model": True}}, "puts 'model' on True"),
        ({"device_map": {"model": None}}, "puts 'model' on None"),
        ({"device_map": {"model": "nowhere"}}, "puts 'model' on 'nowhere', which cannot be used here"),
        ({"device_map": "auto", "device": "cpu"}, "leave it or model.device out"),
        ({"device_map": "auto", "compile": True}, "leave it or model.compile=true out"),
        ({"device_map": "auto", "weights": "int8"}, "leave it or model.weights=int8 out"),
        ({"device_map": "auto", "tensor_parallel": True}, "leave it or model.tensor_parallel=true out"),
        ({"device_map": "auto", "architecture": {"model_type": "opt"}}, "leave it or model.architecture out"),
    ],
)
def test_maps_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelOptions("demo", **options))
    assert message in str(caught.value)


def test_without_accelerate_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'emssd\[devices\]'"):
        load_model(ModelOptions("demo", device_map="auto"))


def test_what_cannot_be_spread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"leave it or model\.device_map out"):
        TargetModel(hooked("opt"), ModelOptions(compile=True))
    target = TargetModel(hooked("llama"), ModelOptions(compile="auto"))
    assert (target.compiled, target.may_compile) == (None, False)
    monkeypatch.setattr("emssd.model.run.target.layer_devices", lambda target: (OTHER, CPU))
    with pytest.raises(UnsupportedModelError, match=r"with model\.device_map, no drafter runs"):
        Engine.from_model(hooked("llama"), drafter="early_exit")
    with monkeypatch.context() as patch:
        patch.setattr("emssd_ragged.grouped.GroupedKernels.takes_devices", False)
        with pytest.raises(PluginError, match=r"no layers on several devices, and model\.device_map puts them there"):
            Engine.from_model(hooked("llama"))
    on_disk = hooked("llama")
    on_disk.hf_device_map = {"model.layers.1": "disk", "lm_head": "cpu"}
    with pytest.raises(UnsupportedModelError, match=r"put 'model\.layers\.1' and 0 more modules on disk"):
        TargetModel(on_disk)
