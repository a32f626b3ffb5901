"""A GGUF file as the model of a job that is resumed, of a server, and on the hub."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd import Engine
from emssd.cli import serve
from emssd.data.openai import COMPLETIONS
from emssd.errors import ConfigError
from emssd.model.compile.packed import PackedLinear
from tests.model.test_gguf import write_file

from .conftest import RESUME
from .serving import serving


@pytest.fixture
def file(work: Path) -> Path:
    return write_file(work / "tiny.gguf", kinds=["Q8_0"])


def test_a_job_goes_on_with_the_same_file_alone(decode: Callable, file: Path) -> None:
    options = f"model.path={file}", "drafter=none"
    assert len(decode(*options, "data.limit=2").rows) == 2
    content, limit = file.read_bytes(), b"context_length" + struct.pack("<I", 4)
    file.write_bytes(content.replace(limit + struct.pack("<I", 128), limit + struct.pack("<I", 100)))
    assert f"the files of model.path={file} held something else" in decode(*options, *RESUME).sentence
    file.write_bytes(content)
    assert len(decode(*options, *RESUME).rows) == 5


def test_a_file_is_served(emssd: Callable, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(str(file)) as client:
        answer = client.ask(COMPLETIONS, prompt="ABC", temperature=0)["choices"][0]["text"]
    engine = Engine.from_pretrained(str(file), compile=False)
    assert answer == engine.generate(["ABC"], 6)[0].text
    monkeypatch.setattr(serve._Uvicorn, "run", lambda *_, **__: None)
    assert f"{file} answers at http://" in emssd("serve", file, "port=0", "model.compile=false").err


def test_a_file_of_the_hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client keeps what it has downloaded."""
    commit, folder = "1" * 40, tmp_path / "hub" / "models--some--model"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    file.rename(folder / "snapshots" / commit / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    engine = Engine.from_pretrained("some/model", gguf_file=file.name, device="cpu", compile=False)
    assert isinstance(engine.target.model.lm_head, PackedLinear)
    assert engine.generate(["ABC"], 3, ignore_eos=True)[0].text
    with pytest.raises(ConfigError, match=r"the hub has no b\.gguf, which model\.gguf_file names"):
        Engine.from_pretrained("some/model", gguf_file="b.gguf", device="cpu")
