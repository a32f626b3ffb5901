"""The options: every preset composes, help lists what is installed, and a default is written down once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from emssd.cli.config import ModelConfig, RunConfig, conf_dir, register_configs
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.model.random_weights import counted_on, counting_model
from emssd.plugins.registry import KINDS, Registry
from tests.support.tiers import looped

pytestmark = pytest.mark.usefixtures("composed_once")
PRESETS = sorted(path for path in conf_dir().glob("*/*.yaml") if path.parent.name in (*KINDS, "model"))


@pytest.fixture(scope="module", autouse=True)
def store() -> Registry:
    registry = Registry()
    register_configs(registry)
    return registry


def compose(*overrides: str) -> RunConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = hydra.compose("config", list(overrides))
    options = OmegaConf.to_object(config)
    assert isinstance(options, RunConfig)
    return options


@looped("path", PRESETS, at_a_time=7)
def test_every_preset_composes_to_its_plugins_dataclass(path: Path, store: Registry) -> None:
    options = compose(f"{path.parent.name}={path.stem}")
    chosen = getattr(options, path.parent.name)
    if path.parent.name == "model":
        assert isinstance(chosen, ModelConfig)
    else:
        assert isinstance(chosen, store.find(path.parent.name, chosen.name).config)
    for key, value in OmegaConf.load(path).items():
        if key != "defaults":
            assert getattr(chosen, str(key)) == value


@looped("path", PRESETS)
def test_a_preset_says_only_what_differs(path: Path, store: Registry) -> None:
    preset = OmegaConf.load(path)
    (base,) = preset.defaults
    defaults = ModelConfig if path.parent.name == "model" else store.find(path.parent.name, base).config
    fields = [field for field in dataclasses.fields(defaults) if field.name in preset]
    same = {field.name for field in fields if preset[field.name] == field.default}
    assert same <= ({"path"} if path.stem == "demo" else set())  # the demo preset is there for its name


def test_the_main_config_sets_no_option() -> None:
    keys = {str(key) for key in OmegaConf.load(conf_dir() / "config.yaml")}
    assert keys == {"defaults", "hydra"}


def test_the_default_drafter_stands_in_one_place_beside_the_main_config() -> None:
    from emssd import Engine
    from emssd.integrations.hf import custom_generate

    assert compose().drafter.name == DEFAULT_DRAFTER
    for function in (Engine.from_model, Engine.from_pretrained, custom_generate):
        assert inspect.signature(function).parameters["drafter"].default is DEFAULT_DRAFTER


@pytest.mark.parametrize("kind", KINDS)
def test_every_installed_plugin_composes_to_its_defaults(kind: str, store: Registry) -> None:
    for spec in store.specs(kind):
        chosen = getattr(compose(f"{kind}={spec.name}"), kind) if _has_defaults(spec.config) else None
        for field in dataclasses.fields(spec.config) if chosen else ():
            if field.default is not dataclasses.MISSING:
                assert getattr(chosen, field.name) == field.default


def _has_defaults(config: type) -> bool:
    return all(field.default != "???" for field in dataclasses.fields(config))


def test_cfg_job_shows_the_result_without_running(emssd: Callable) -> None:
    result = emssd("drafter=llma", "drafter.match_length=3", "backend=unpad_kv", "--cfg", "job")
    config = OmegaConf.create(result.out)
    assert config.drafter == {
        "match_length": 3, "copy_length": 7, "search": "prompt", "occurrence": "last", "require_full_copy": True,
        "branches": 1, "name": "llma",
    }  # fmt: skip
    assert config.backend == {"pad_kv": False, "pad_inputs": True, "name": "padded"}
    assert config.batch_size == RunConfig.batch_size


@pytest.fixture
def presets(work: Path) -> str:
    """A folder as docs/experiments.md describes it, and an experiment beside."""
    files = {
        "drafter/draft_1m": "defaults: [draft_model]\npath: models/gsm-llama-1m\n",
        "drafter/rest_gsm8k": "defaults: [rest]\nstore: stores/gsm8k\n",
        "experiment/mine": "# @package _global_\nmax_new_tokens: 3\ndrafter: {copy_length: 2}\n",
    }
    for name, text in files.items():
        path = work / "presets" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return "presets"


@looped("option", [["--config-dir", "presets"], ["--config-dir=presets"], ["-cd", "presets"]])
def test_presets_of_the_users_own(option: list[str], presets: str, emssd: Callable) -> None:
    chosen = ["drafter=draft_1m", "drafter.num_speculative_tokens=3", "size=toy", "--cfg", "job", "-p", "drafter"]
    result = emssd(*option, *chosen)
    assert "path: models/gsm-llama-1m\nnum_speculative_tokens: 3\n" in result.out, result
    assert "store: stores/gsm8k\n" in emssd(*option, "drafter=rest_gsm8k", *chosen[3:]).out


def test_a_folder_of_presets_leaves_the_other_checks_on(presets: str, emssd: Callable) -> None:
    for arguments, said in (
        (("drafter=llma", "drafter.copy_lenght=3"), "drafter 'llma' has no option 'copy_lenght'; "),
        (("drafter=draft_1m", "batchsize=4"), "there is no option 'batchsize'; did you mean "),
        (("drafter=draft_2m",), "unknown drafter 'draft_2m'; "),
        (("experiment=fig1", "size=larg"), "size: Invalid value 'larg', expected one of [toy, small, "),
        (("experiment=appendix", "size=shapes"), "this experiment has no size 'shapes'; choose one of "),
    ):
        assert emssd("--config-dir", presets, *arguments).sentence.startswith(said)
    assert emssd("--config-dir", "nowhere", "drafter=mine").sentence == (
        f"Additional config directory '{Path.cwd() / 'nowhere'}' not found"
    )


def test_an_experiment_of_the_users_own_may_set_the_options_of_what_is_chosen(presets: str, emssd: Callable) -> None:
    result = emssd("--config-dir", presets, "experiment=mine", "drafter=llma", "drafter.match_length=4", "--cfg", "job")
    assert "\n  match_length: 4\n  copy_length: 2\n" in result.out, result


@looped("said", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_a_shape_may_say_that_its_embeddings_are_tied(said: dict[str, bool]) -> None:
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20}  # fmt: skip
    model = counting_model(shape | said, torch.float32, torch.device("cpu"))
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    tokens = model.generate(torch.tensor([[3]]), max_new_tokens=4, do_sample=False)[0, 1:].tolist()
    assert tokens == counted_on(3, 4, 20)
