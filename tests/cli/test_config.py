"""The options: every preset composes, a default is written once, and any text gives options or a sentence."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from emssd.data.model_options import ModelOptions
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
    from emssd.integrations.hf import custom_generate

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
    for arguments, said in (
        (("drafter=llma", "drafter.copy_lenght=3"), "drafter 'llma' has no option 'copy_lenght'; "),
        (("drafter=draft_1m", "batchsize=4"), "there is no option 'batchsize'; did you mean "),
        (("cluster=ray",), "there is no option 'cluster' any more. Ray Data spreads a job over workers; docs/how_to/"),
        (("model.fallback=per_row",), "there is no option 'model.fallback' any more. A model that "),
        (("model.frozen=true",), "there is no option 'model.frozen' any more. A run loads its model itself"),
        (("model.checksums=true",), "there is no option 'model.checksums' any more. A run loads its model itself"),
        (("chat_template=a.jinja",), "chat_template= makes prompts of conversations, and these are texts; "),
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


Composed = Callable[..., tuple[Any, list[RunConfig]]]


@pytest.fixture
def composed(emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> Composed:
    """``composed(*arguments)`` ends where decoding would begin; gives the result, and the options of each run."""
    runs: list[RunConfig] = []
    monkeypatch.setattr(Jobs, "run", lambda self, config, *_: runs.append(config))
    monkeypatch.setattr(Jobs, "run_of_experiment", lambda self, config, *_: runs.append(config))
    monkeypatch.setattr(Jobs, "finish", lambda self: None)
    registry = Registry()
    monkeypatch.setattr(cli, "Registry", lambda: registry)

    def run(*arguments: str) -> tuple[Any, list[RunConfig]]:
        runs.clear()
        return emssd(*arguments), list(runs)

    return run


_ODD = "{}[]()'\"\\$~+=,:@#.;*?!&|<>^%` \n\té√😀"
_ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # a command line holds no other
_ATOMS = st.one_of(
    st.integers(), st.integers(-(10**40), 10**40), st.floats().map(str), st.booleans(), st.text(_ODD, max_size=6),
    st.text(string.ascii_letters, max_size=4), st.text(_ODD).map(lambda text: f"'{text}'"),
    st.sampled_from(["null", "", "???", "nan", "-inf", "1e400", "0x10", "1_000", "on", "llma", "none", "toy"]),
    st.sampled_from(["${nope}", "${batch_size}", "${oc.env:NOPE}", "${drafter}", "${model.path}", "${now:%Y}", "${..}",
                     "${oc.decode:[}", "${oc.create:{a:1}}", "${oc.dict.keys:model}", "${hydra:runtime.cwd}", "\\${a}",
                     "${emssd_help:}", "${${size}}", "choice(1,2)", "range(3)", "int(x)", "glob(*)", "sort(2,1)"]),
).map(str)  # fmt: skip
_PLAIN = st.sampled_from(["1", "3", "true", "false", "null", "0.5", "auto", "greedy", "toy", "'a b'", "[a,b]", "1,2"])
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(inner, min_size=1, max_size=3).map(",".join),
        st.dictionaries(_ATOMS, inner, max_size=2).map(
            lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=5,
)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """Like ``+GROUP.OPTION@PACKAGE=VALUE``, or anything at all."""
    options = [field.name for field in dataclasses.fields(RunConfig) if field.name != "output_dir"]
    inside = ["drafter.copy_length", "drafter.name", "model.compile", "model.architecture", "model.architecture.a.b",
              "data.limit", "data.where.x", "budget.memory", "budget", "stop[0]", "hydra.verbose", "hydra.job.num",
              "hydra/launcher", "hydra.sweeper.params", "hydra.overrides.task", "hydra", "defaults", ""]  # fmt: skip
    kind = draw(st.sampled_from(["plain"] * 3 + ["odd"] * 3 + ["anything"]))
    if kind == "plain":
        return f"{draw(st.sampled_from(options))}={draw(_PLAIN)}"
    if kind == "anything":
        return draw(st.text(_ODD + "az09", max_size=12)).lstrip("-")  # those are flags
    name = draw(st.sampled_from(options + inside) | st.text(string.ascii_lowercase + "._@/", max_size=8))
    prefix, between = (
        draw(st.sampled_from(["", "", "", "+", "++", "~"])),
        draw(st.sampled_from(["="] * 8 + ["", "@x="])),
    )
    return f"{prefix}{name}{between}{draw(_VALUES)}".lstrip("-")


@pytest.mark.nightly
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each run begins with an empty output
@given(st.lists(overrides(), min_size=1, max_size=2), st.booleans())
@example(["={}"], False)
@example(["++experiment={True:-828}"], False)
@example(["~batch_size"], False)
def test_any_overrides_give_options_that_can_be_or_a_sentence(
    composed: Composed, arguments: list[str], is_sweep: bool
) -> None:
    result, runs = composed(*["-m"] * is_sweep, *arguments)
    if result.status:
        assert len(result.sentence) > 10
    for options in runs:
        assert isinstance(options, RunConfig)
        _assert_valid(dataclasses.asdict(options))


def _assert_valid(value: Any) -> None:
    """No number in `value` is one with which nothing can be computed."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _assert_valid(item)
    assert not isinstance(value, (int, float)) or (math.isfinite(value) and abs(value) < 2**63)


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
    def fails(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(Jobs, "run", fails)
    with pytest.raises(KeyError, match="ours"):
        composed()
    assert "HYDRA_FULL_ERROR" not in os.environ
