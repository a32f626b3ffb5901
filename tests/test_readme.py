"""The README's code is code that runs: each block equals a file, and the files are run here or by a nox session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugins" / "repeat_last"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def run(path: Path) -> str:
    command = [sys.executable, str(path)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200).stdout


def test_each_python_block_is_a_file_of_the_examples() -> None:
    library, generate, plugin = blocks("python")
    assert library == (ROOT / "examples" / "library.py").read_text()
    assert generate == (ROOT / "examples" / "hf_generate.py").read_text()
    assert plugin == (EXAMPLE / "emssd_example_repeat.py").read_text()  # run by nox -s example_plugin


def test_the_entry_point_in_the_readme_is_that_of_the_example() -> None:
    (entry,) = blocks("toml")
    assert entry in (EXAMPLE / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_library_example_prints_each_prompts_text() -> None:
    assert sorted(re.findall(r"^([01]) .*?\(τ \d\.\d\d\)$", run(ROOT / "examples" / "library.py"), re.M | re.S)) == [
        "0",
        "1",
    ]


def test_the_generate_example_equals_generate_without_emssd(capsys: pytest.CaptureFixture[str]) -> None:
    source = (ROOT / "examples" / "hf_generate.py").read_text()
    exec(compile(source, "hf_generate.py", "exec"), {})
    ours = capsys.readouterr().out
    exec(
        compile(source.replace("custom_generate=emssd.custom_generate, drafter=", "tokenizer=None) #"), "", "exec"), {}
    )
    assert ours == capsys.readouterr().out


def test_ci_calls_the_readmes_test_command() -> None:
    setup_and_test = next(block for block in blocks("") if "nox" in block)
    ci = (ROOT / ".ci" / "run").read_text()
    for part in ("-m venv .venv", '.venv/bin/pip install -q -c constraints.txt -e ".[dev]"', ".venv/bin/nox -s "):
        assert part in setup_and_test
        assert part in ci
