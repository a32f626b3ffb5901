"""A tiny model in a folder, and the command line as a function."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing import authoring
from emssd_testing.models import tiny_model
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from emssd import __main__
from emssd.decoding import engine
from emssd.hooks.registry import KINDS
from emssd.sequences import Row

from .result import Result, assert_said, fenced, files, jsonl
from .shared import composed_once, loaded_once, without_copies

__all__ = ["assert_said", "composed_once", "fenced", "files", "jsonl", "loaded_once"]  # also fixtures

RESUME = ("overwrite=false", "resume=true")
"""Arguments of `decode` that go on with the job in ``out``."""

_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # ids 0 to 3, as the tiny models' configs say


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; needs no training and reads any text."""
    vocab = {token: i for i, token in enumerate(_SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no role robot') }}{% endif %}"
    "[{{ message.role[0] }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def save_model(folder: Path, *, eos: bool = True, chat_template: str | None = None) -> Path:
    """A tiny OPT and its tokenizer, in float64, 96 tokens long.

    With this seed its greedy text soon repeats itself, so that retrieval drafts get accepted, and EOS comes up.
    """
    logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    model = tiny_model("opt", dtype=torch.float64, vocab_size=len(tokenizer), max_model_len=96, std=0.12)
    if not eos:
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def model_without_eos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model_without_eos"), eos=False))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its prompt for the message "hi" is ``<s>[u]hi[a]``."""
    return str(save_model(tmp_path_factory.mktemp("chat_model"), chat_template=CHAT_TEMPLATE))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prompts(work: Path) -> Path:
    """Five prompts, one per line; an empty line does not count."""
    path = work / "prompts.txt"
    path.write_text("hello hello hello\nabc abcd abc\n\nround and round\nx\nfoo bar foo bar foo\n")
    return path


@pytest.fixture
def emssd(
    work: Path,
    composed_once: None,
    loaded_once: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Result]:
    """``emssd(*arguments)`` runs the command line in this process, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("hydra._internal.utils.is_under_debugger", lambda: False)  # it takes coverage for one
    Plugins.instance()  # Hydra's own entries of the store come with its plugins, once in a process
    repo = {group: node for group, node in ConfigStore.instance().repo.items() if group not in KINDS}
    monkeypatch.setattr(ConfigStore.instance(), "repo", without_copies(repo))  # without what an earlier test has put in

    def run(*arguments: object) -> Result:
        in_order = sorted(map(str, arguments), key=lambda argument: argument != "-m")  # Hydra wants it first
        monkeypatch.setattr(sys, "argv", ["emssd", *in_order])
        with warnings.catch_warnings():  # main() sets how its process shows them
            warnings.simplefilter("default")
            return _result(__main__.main, capsys, work / "out")

    return run


def _result(command: Callable[[], None], capsys: pytest.CaptureFixture[str], folder: Path) -> Result:
    capsys.readouterr()
    status: Any = 0
    try:
        command()
    except SystemExit as stop:
        status = stop.code or 0
    return Result(int(status), *capsys.readouterr(), folder)


@pytest.fixture
def plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``plugins(*arguments)`` runs ``emssd-plugins`` in this process."""
    return lambda *arguments: _result(lambda: authoring.main([*arguments]), capsys, tmp_path)


@pytest.fixture
def decode(emssd: Callable[..., Result], model: str, prompts: Path) -> Callable[..., Result]:
    """``decode(*arguments)`` decodes the five prompts with the tiny model into the folder ``out``, anew each time."""

    def run(*arguments: object) -> Result:
        return emssd(
            f"model.path={model}", "data=text", f"data.path={prompts}", "max_new_tokens=24", "batch_size=3",
            "output_dir=out", "overwrite=true", "progress=false", *arguments,
        )  # fmt: skip

    return run


@pytest.fixture
def decode_records(emssd: Callable[..., Result], model: str, work: Path) -> Callable[..., Result]:
    """``decode_records(records, *arguments)`` decodes those of ``f.jsonl``; text and bytes are lines as they stand."""

    def run(records: list[Any], *arguments: object) -> Result:
        lines = [record if isinstance(record, (str, bytes)) else json.dumps(record) for record in records]
        lines = [line.encode() if isinstance(line, str) else line for line in lines]
        (work / "f.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        data = ("data=jsonl", "data.path=f.jsonl", "output_dir=out", "progress=false")
        return emssd(f"model.path={model}", *data, *arguments)

    return run


@pytest.fixture
def draft_wrongly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """``draft_wrongly()`` makes steps with a draft give wrong tokens; plain runs stay right."""

    def start() -> None:
        right = engine.Engine._verify

        def wrong(self: Any, rows: Any, draft: Any, output: Any) -> Any:
            verified = right(self, rows, draft, output)
            for row in verified if draft.indptr[-1] else ():
                row.new_tokens[-1] = 5
            return verified

        monkeypatch.setattr(engine.Engine, "_verify", wrong)

    return start


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """``fail_at(number, error)`` lets the engine end with an error in that step."""

    def start(number: int, error: BaseException) -> None:
        step, steps = engine.Engine.step, count(1)

        def fails(self: engine.Engine) -> list[Row]:
            if next(steps) == number:
                raise error
            return step(self)

        monkeypatch.setattr(engine.Engine, "step", fails)

    return start


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """``install(name, source)`` puts a distribution ``third-party-NAME 1.2`` on the path, with one plugin module."""

    def run(name: str, source: str) -> None:
        site = tmp_path / f"site_{name}"
        shutil.rmtree(site, ignore_errors=True)  # of the same name before
        info = site / f"third_party_{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (site / f"third_party_{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: third-party-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[emssd]\n{name} = third_party_{name}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, f"third_party_{name}", raising=False)

    return run


@pytest.fixture
def start(work: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(*arguments)`` starts ``python -m emssd`` as a process of its own, without a network."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "emssd", *map(str, arguments)],
            cwd=work, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a script's `&` ignore Ctrl-C
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()  # nothing happens to one that has ended
        process.wait()


def wait_for_rows(path: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until the process has written so many."""
    end = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no rows came"
        time.sleep(0.01)


_DRAFTER = """
from copy import copy
from dataclasses import dataclass, field
from emssd.drafting import Draft, Drafter
from emssd.hooks import DrafterSpec, hookimpl

@dataclass
class Config:
    {options}

class Third(Drafter):
    num_speculative_tokens = 2

    def propose(self, batch, budget):
        {propose}

@hookimpl
def emssd_drafters():
    return [DrafterSpec("{name}", Config, lambda config, context: Third())]
"""


def drafter(propose: str = "return Draft.empty(len(batch))", *, name: str = "third", options: str = "pass") -> str:
    """Source of a plugin with a drafter whose `propose` is the given code."""
    return _DRAFTER.format(propose=propose, name=name, options=options)
