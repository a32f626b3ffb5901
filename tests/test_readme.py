"""The README's code is code that runs: each block is of a file, and the files are run here or by a nox session."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emssd.hooks.registry import Registry

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugins" / "repeat_last"


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def run(path: Path) -> str:
    command = [sys.executable, str(path)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200).stdout


def test_each_python_block_is_of_a_file_of_the_examples() -> None:
    library, drafter = blocks("python")
    assert library == (ROOT / "examples" / "library.py").read_text()
    plugin = (EXAMPLE / "emssd_example_repeat.py").read_text()  # run by nox -s example_plugin
    (whole,) = [node for node in ast.parse(plugin).body if getattr(node, "name", "") == "RepeatDrafter"]
    assert drafter == f"{ast.get_source_segment(plugin, whole)}\n"


def test_all_drafters_and_backends_are_named() -> None:
    text = (ROOT / "README.md").read_text()
    registry = Registry()
    for kind in ("drafter", "backend"):
        ours = [spec.name for spec in registry.specs(kind) if registry.source(kind, spec.name).startswith("emssd ")]
        assert ours
        assert [name for name in ours if f"`{name}`" not in text] == []


def test_every_link_leads_to_a_file_and_a_heading_of_it() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([\w-]+))?\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], anchor


@pytest.mark.docs
def test_the_library_example_prints_what_the_readme_shows() -> None:
    assert run(ROOT / "examples" / "library.py") in blocks("text")


@pytest.mark.docs
def test_the_sampling_example_finds_equal_texts() -> None:
    assert run(ROOT / "examples" / "sampling.py") == "True\n"


@pytest.mark.docs
def test_the_generate_example_equals_generate_without_emssd(capsys: pytest.CaptureFixture[str]) -> None:
    source = (ROOT / "examples" / "hf_generate.py").read_text()
    exec(compile(source, "hf_generate.py", "exec"), {})
    ours = capsys.readouterr().out
    exec(
        compile(source.replace("custom_generate=emssd.custom_generate, drafter=", "tokenizer=None) #"), "", "exec"), {}
    )
    assert ours == capsys.readouterr().out


@pytest.mark.docs
def test_the_generate_batch_example_streams_a_text() -> None:
    assert "\n40 tokens so far\n" in run(ROOT / "examples" / "generate_batch.py")


def test_ci_calls_the_readmes_test_command() -> None:
    setup_and_test = next(block for block in blocks("") if "nox" in block)
    ci = (ROOT / ".ci" / "run").read_text()
    for part in ("-m venv .venv", '.venv/bin/pip install -q -c constraints.txt -e ".[dev]"', ".venv/bin/nox -s "):
        assert part in setup_and_test
        assert part in ci
