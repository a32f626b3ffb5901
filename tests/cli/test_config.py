"""The options: every preset composes, a default is written once, and any text gives options or a sentence."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from emssd.cli import command as cli
from emssd.cli.config import RunConfig, conf_dir, register_configs
from emssd.cli.jobs import Jobs
from emssd.cli.options import _GONE
from emssd.data.model_options import ModelOptions
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.hooks.registry import KINDS, Registry
from emssd.model.load.loading import counted_on, counting_model
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
        assert isinstance(chosen, ModelOptions)
    else:
        assert isinstance(chosen, store.find(path.parent.name, chosen.name).config)
    for key, value in OmegaConf.load(path).items():
        if key != "defaults":
            assert getattr(chosen, str(key)) == value


@looped("path", PRESETS)
def test_a_preset_says_only_what_differs(path: Path, store: Registry) -> None:
    preset = OmegaConf.load(path)
    (base,) = preset.defaults
    defaults = ModelOptions if path.parent.name == "model" else store.find(path.parent.name, base).config
    fields = [field for field in dataclasses.fields(defaults) if field.name in preset]
    same = {field.name for field in fields if preset[field.name] == field.default}
    assert same <= ({"path"} if path.stem == "demo" else set())  # the demo preset is there for its name


def test_the_main_config_sets_no_option() -> None:
    keys = {str(key) for key in OmegaConf.load(conf_dir() / "config.yaml")}
    assert keys == {"defaults", "hydra"}


def test_the_default_drafter_stands_in_one_place_beside_the_main_config() -> None:
    from emssd import Engine
    from emssd.integrations.custom_generate import custom_generate

    assert compose().drafter.name == DEFAULT_DRAFTER
    for function in (Engine.from_model, Engine.from_pretrained, custom_generate):
        assert inspect.signature(function).parameters["drafter"].default is DEFAULT_DRAFTER


def test_every_installed_plugin_has_its_defaults_in_the_store(store: Registry) -> None:
    for kind in KINDS:
        for spec in store.specs(kind):
            assert not (conf_dir() / kind / f"{spec.name}.yaml").exists(), "it would stand before the plugin's own"
            node = ConfigStore.instance().load(f"{kind}/{spec.name}.yaml").node
            for field in dataclasses.fields(spec.config):
                if field.default not in (dataclasses.MISSING, "???"):
                    assert node[field.name] == field.default, (spec.name, field.name)


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
    for arguments, sentence in (
        (("drafter=llma", "drafter.copy_lenght=3"), "drafter 'llma' has no option 'copy_lenght'; "),
        (("drafter=draft_2m",), "unknown drafter 'draft_2m'; "),
    ):
        assert emssd("--config-dir", presets, *arguments).sentence.startswith(sentence)
    assert emssd("--config-dir", "nowhere", "drafter=mine").sentence == (
        f"Additional config directory '{Path.cwd() / 'nowhere'}' not found"
    )


@looped("option", _GONE)
def test_an_option_of_an_earlier_version_is_told_with_what_stands_in_for_it(option: str, emssd: Callable) -> None:
    assert emssd(f"{option}=x").sentence == f"there is no option {option!r} any more. {_GONE[option]}"


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


Composed = Callable[..., tuple[Any, list[RunConfig]]]


@pytest.fixture
def composed(emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> Composed:
    """``composed(*arguments)`` ends where decoding would begin; gives the result, and the options of each run."""
    runs: list[RunConfig] = []
    monkeypatch.setattr(Jobs, "run", lambda self, config, *_: runs.append(config))
    monkeypatch.setattr(Jobs, "finish", lambda self: None)
    registry = Registry()
    monkeypatch.setattr(cli, "Registry", lambda: registry)

    def run(*arguments: str) -> tuple[Any, list[RunConfig]]:
        runs.clear()
        return emssd(*arguments), list(runs)

    return run


_ODD = "{}[]()'\"\\$~+=,:@#.;*?!&|<>^%` \n\té√😀"


@pytest.mark.nightly
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])  # as above
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(_ODD)), st.booleans()
)
@example("${", False)
@example("\\\\${a}\\", True)
@example("Hello, world: {a: [1, 'b']} \"c\" = d", True)
@example("'quoted' and 'quoted'", False)
def test_a_prompt_is_taken_as_it_stands(composed: Composed, prompt: str, is_sweep: bool) -> None:
    quoted = re.fullmatch(r"""'.*'|".*\"""", prompt, re.DOTALL)
    result, runs = composed(*["-m"] * is_sweep, f"prompt={prompt}")
    if prompt != "null" and not quoted:
        assert [run.prompt for run in runs] == [prompt], result


def test_a_prompt_in_hydras_quotes_is_left_to_hydra(composed: Composed) -> None:
    for typed, prompt in (("'a, b'", "a, b"), ('"a \\"b\\""', 'a "b"'), ("null", None), ("", "")):
        assert [run.prompt for run in composed(f"prompt={typed}")[1]] == [prompt]


def test_without_any_argument_the_defaults_run(composed: Composed) -> None:
    result, (options,) = composed()
    assert result.status == 0
    assert (options.drafter.name, options.data.name) == (DEFAULT_DRAFTER, "demo")


def test_a_fault_of_ours_keeps_its_traceback(composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "run", Mock(side_effect=KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        composed()
    assert "HYDRA_FULL_ERROR" not in os.environ
