"""The model ``emssd`` of the evaluation harness gives the texts and scores of ``hf``; run by nox -s lm_eval."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from emssd.errors import ConfigError, PluginError
from emssd.integrations import installed, lm_eval_command
from tests.cli.conftest import save_model
from tests.support.tiers import looped

WHY = "the evaluation harness is not installed: nox -s lm_eval, or pip install 'emssd[lm-eval]'"
ROOT = Path(__file__).resolve().parents[2]


def test_without_the_harness_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "version", Mock(side_effect=PackageNotFoundError("lm_eval")))
    with pytest.raises(SystemExit, match="2"):
        lm_eval_command.main()
    said = "emssd-lm-eval: error: this needs the evaluation harness: pip install 'emssd[lm-eval]'\n"
    assert capsys.readouterr().err == said


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def harness() -> Any:
    """The module that registers ``emssd``."""
    pytest.importorskip("lm_eval", reason=WHY)
    import emssd.integrations.lm_eval as module

    return module


@pytest.fixture(scope="module")
def pair(harness: Any, model: str) -> tuple[Any, Any]:
    """`HFLM` and ours of the same model, three rows at a time; it drafts for itself, so that drafts are accepted."""
    from lm_eval.models.huggingface import HFLM

    options: dict[str, Any] = {"pretrained": model, "dtype": "float64", "device": "cpu", "batch_size": 3}
    return HFLM(**options), harness.EmssdLM(**options, drafter="draft_model", budget="fixed", **{"drafter.path": model})


CONTEXTS = ["round and round and", "x", "abc abcd abc", "hello hello hello", "foo bar foo bar foo", "a b", "ab ab ab"]


def requests_of(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_texts_are_those_of_hf_for_every_group_of_options(pair: tuple[Any, Any]) -> None:
    plain = {"until": ["zz"], "max_gen_toks": 30}
    cut = {"until": ["e", "o"], "max_gen_toks": 20, "do_sample": False}
    penalty = {"until": [], "max_gen_toks": 9, "do_sample": False, "repetition_penalty": 1.3}
    asked = [(context, options) for context in CONTEXTS for options in (plain, cut, penalty)]
    hf, ours = (each.generate_until(requests_of("generate_until", asked), disable_tqdm=True) for each in pair)
    assert ours == hf
    assert len(set(ours)) > len(CONTEXTS)
    pair[1].generate_until(requests_of("generate_until", [(text, plain) for text in CONTEXTS]), disable_tqdm=True)
    assert pair[1].engine.report.num_accepted > 0
    assert pair[1].batch_size == 3


def test_sampling_is_that_of_transformers_at_a_temperature_that_leaves_no_choice(pair: tuple[Any, Any]) -> None:
    asked = [(context, {"until": ["zz"], "max_gen_toks": 12, "do_sample": True, "temperature": 1e-6, "top_k": 0})
             for context in CONTEXTS[:2]]  # fmt: skip
    hf, ours = (each.generate_until(requests_of("generate_until", asked), disable_tqdm=True) for each in pair)
    assert ours == hf


def test_loglikelihoods_are_those_of_hf_also_behind_an_engine(pair: tuple[Any, Any]) -> None:
    asked = [(context, " and") for context in CONTEXTS]
    hf, ours = (each.loglikelihood(requests_of("loglikelihood", asked), disable_tqdm=True) for each in pair)
    assert ours == hf


@looped(
    ("options", "sentence"),
    [
        ({"drafter": "llma", "drafter.copy_lenght": 3}, "drafter 'llma' has no option 'copy_lenght'; did you mean"),
        ({"drafter": object(), "drafter.x": 3}, r"drafter\.x goes with a name as in drafter=NAME"),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype would change what the engine decodes"),
        ({"batchsize": 3}, "neither emssd nor HFLM has such an argument: .*'batchsize'"),
        ({"drafter": "sufix"}, "unknown drafter 'sufix'; did you mean 'suffix'"),
        ({"pretrained": "nowhere/at/all"}, "cannot load 'nowhere/at/all': "),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], sentence: str, harness: Any, model: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=sentence):
        harness.EmssdLM(**{"pretrained": model, "device": "cpu"} | options)


@pytest.mark.parametrize("wish", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True, "temperature": 1.0},
                                  {"max_length": 40}, {"min_length": 15}])  # fmt: skip
def test_options_of_a_task_that_cannot_be_honoured_are_refused(wish: dict[str, Any], pair: tuple[Any, Any]) -> None:
    asked = [("x", {"until": ["zz"], "max_gen_toks": 2} | wish)]
    with pytest.raises(
        ConfigError, match=r"cannot honour num_beams=2|answers each request once|m.._length counts padding"
    ):
        pair[1].generate_until(requests_of("generate_until", asked), disable_tqdm=True)
    assert pair[1].batch_size == 3


def test_the_command_finds_the_model_by_its_name(
    harness: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # from where the example's paths are
    arguments = f"pretrained={model},dtype=float64,drafter=llma,drafter.copy_length=3"
    command = f"emssd-lm-eval --model emssd --model_args {arguments} --tasks questions --batch_size 2 --device cpu"
    wanted = [*command.split(), "--include_path", "examples/lm_eval", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", wanted)
    lm_eval_command.main()
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["config"]["model"] == "emssd"
    assert found["results"]["questions"]["exact_match,last-number"] in (0.0, *(n / 3 for n in (1, 2, 3)))
