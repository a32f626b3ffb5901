"""Help for newcomers: ``--help``, ``--version``, completion; none of it minds a closed pipe."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
import transformers
from emssd_heads.training.cli import main as train_main
from emssd_lab.report.__main__ import main as report_main
from emssd_rest.cli import main as rest_main
from emssd_testing.authoring import main as plugins_main

import emssd as package
from emssd.__main__ import main as emssd_main
from emssd.cli.config import RunConfig, conf_dir
from emssd.cli.option_texts import option_texts
from emssd.data.model_options import ModelOptions
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped

from .conftest import drafter

COMMANDS: dict[str, Callable[[], None]] = {
    "emssd": emssd_main,
    "emssd-plugins": plugins_main,
    "emssd-rest": rest_main,
    "emssd-train": train_main,
    "python -m emssd_lab.report": report_main,
}


def told(text: str) -> dict[str, tuple[str, str]]:
    """Value and description of each option."""
    entries = re.findall(r"^  ([\w.]+)=(\S*)((?: .*)?(?:\n {32}.*)*)", text, re.MULTILINE)
    return {name: (value, " ".join(said.split())) for name, value, said in entries}


def choices(text: str) -> dict[str, list[str]]:
    """The choices of each group. The chosen one has a star."""
    entries = re.findall(r"^  (\w+) {2,}((?:[\w*]+, )*[\w*]+,?(?:\n {14}.*)*)$", text, re.MULTILINE)
    listed = re.findall(r"^  (\w+)\n((?: {4}\w.*\n)+)", text, re.MULTILINE)
    return {group: re.split(r",\s+", names) for group, names in entries} | {
        group: [line.split()[0] for line in lines.splitlines()] for group, lines in listed
    }


def test_help_lists_everything_that_is_installed_and_what_is_chosen(emssd: Callable) -> None:
    groups = choices(emssd("--help").out)
    for kind in KINDS:
        presets = {path.stem for path in (conf_dir() / kind).glob("*.yaml")}
        assert {name.rstrip("*") for name in groups[kind]} == {*Registry().names(kind), *presets}
    chosen = {group: [name for name in names if name.endswith("*")] for group, names in groups.items()}
    assert chosen["drafter"] == ["suffix*"]
    assert chosen["method"] == []
    assert choices(emssd("drafter=llma_original", "--help").out)["drafter"].count("llma_original*") == 1


def test_help_says_a_few_words_on_every_plugin_and_preset(
    emssd: Callable, install: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = emssd("--help").out.split("\nSet options")[0].splitlines()
    words = {line.split()[0]: line[26:] for line in lines if line.startswith("    ") and line[4].isalpha()}
    assert set(words) >= {name if name != "suffix" else "suffix*" for name in Registry().names("drafter")}
    assert all(len(text) > 10 for text in words.values()), words
    assert words["cascade"] == "several drafters in turn, each for the rows that …"
    assert words["llma_original"] == "LLMA as first published (Yang et al. 2023): the …"
    assert "\ndrafter=none has no options.\n" in emssd("drafter=none", "--help").out
    install("third", drafter(options="width: int = 4"))
    stranger = emssd("drafter=third", "--help").out
    assert "\n    third*\n" in re.sub(" +\n", "\n", stranger)
    assert told(stranger)["drafter.width"] == ("4", "")


def test_help_describes_every_option_of_what_is_chosen(emssd: Callable) -> None:
    result = emssd("--help", "data=text", "batch_size=3")
    options = told(result.out)
    groups = {*KINDS, "model", "sampling", "experiment", "method", "task"}
    for field in dataclasses.fields(RunConfig):
        assert (field.name in options) == (field.name not in groups), field.name
    for field in dataclasses.fields(ModelOptions):
        assert f"model.{field.name}" in options
    assert all(text for _, text in options.values()), options
    assert options["batch_size"] == ("3", "rows decoded together")
    assert options["model.compile"][0] == "auto"
    assert options["data.path"][0] == "VALUE"
    assert options["data.path"][1].endswith("(needed)")
    assert "data.kind" not in options
    assert max(map(len, result.out.splitlines())) <= 120


def test_every_option_has_a_description_in_one_place() -> None:
    registry = Registry()
    for kind in (RunConfig, ModelOptions, *(spec.config for name in KINDS for spec in registry.specs(name))):
        assert all(option.text for option in option_texts(kind)), kind


def test_version_is_that_of_emssd(emssd: Callable) -> None:
    build = version("torch")  # PyPI's 2.11.0 calls itself 2.11.0+cu130 once it is imported
    assert build in (torch.__version__, torch.__version__.partition("+")[0])
    assert emssd("--version").out == (
        f"emssd {package.__version__} (torch {build}, transformers {transformers.__version__})\n"
    )


def test_completion_of_a_shell(emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    script = emssd("-sc", "install=bash")
    assert script.status == 0
    assert script.out.rstrip().endswith("-F hydra_bash_completion emssd")
    monkeypatch.setenv("COMP_LINE", "emssd drafter=ll")
    assert emssd("-sc", "query=bash").out.split() == ["drafter=llma", "drafter=llma_original"]
    monkeypatch.setenv("COMP_LINE", "emssd batch_s")
    assert emssd("-sc", "query=bash").out.split() == ["batch_size="]
    assert emssd("-sc", "install=csh").sentence.startswith("No completion plugin for 'csh' found, available")


@looped("command", COMMANDS)
def test_a_reader_that_goes_away_ends_a_command_quietly(
    command: str, emssd: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with os.fdopen(writing, "w") as nobody_reads, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nobody_reads)
        with pytest.raises(SystemExit) as stop:
            COMMANDS[command]()
        print("more", flush=True)  # as at the end of the process, where a traceback would be printed
    assert not stop.value.code
    assert capsys.readouterr().err == ""
