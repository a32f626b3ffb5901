"""Code that comes with a checkpoint runs only if the command line says so, for the target and for draft models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

CODE = """
from pathlib import Path
from transformers import OPTConfig, OPTForCausalLM
Path(__file__).with_name("ran").touch()
class MyConfig(OPTConfig):
    model_type = "mine"
class MyModel(OPTForCausalLM):
    config_class = MyConfig
"""


@pytest.fixture
def with_code(model: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings code, and a user who says yes to everything."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(work / "modules"))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    folder = Path(shutil.copytree(model, work / "with_code"))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": code}))
    (folder / "mine.py").write_text(f"# {work}{CODE}")  # of each test its own, as modules of the same text are kept
    return folder


@pytest.mark.parametrize("role", ["target", "draft model"])
def test_code_of_a_checkpoint(role: str, with_code: Path, work: Path, decode: Callable) -> None:
    options = ["data.limit=1", "max_new_tokens=4", "drafter=none", f"model.path={with_code}"]
    if role == "draft model":
        options[2:] = ["drafter=draft_model", f"drafter.path={with_code}"]
    sentence = decode(*options).sentence
    assert sentence.startswith(f"cannot load the model '{with_code}': it needs code that comes with the checkpoint; ")
    assert "model.trust_remote_code=true" in sentence
    assert not list(work.rglob("ran"))
    trusted = decode(*options, "model.trust_remote_code=true", "on_drafter_error=fail", "overwrite=true")
    assert trusted.status == 0, trusted
    assert list(work.rglob("ran"))
