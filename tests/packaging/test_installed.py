"""The contents of an installation. `nox -s wheel` runs this against the built wheel, far from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import hydra
import pytest

import emssd
from emssd.cli.config import conf_dir, register_configs
from emssd.hooks.registry import Registry

BIN, EMSSD = Path(sys.executable).parent, [sys.executable, "-m", "emssd"]
MEGABYTE = 2**20

if "EMSSD_WHEEL" not in os.environ:
    pytest.skip("it tests a wheel, and this is a checkout; run nox -s wheel", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that is installed here."""
    return Path(os.environ["EMSSD_WHEEL"])


@pytest.fixture(scope="module", autouse=True)
def store() -> None:
    register_configs(Registry())


def run(*command: object, cwd: Path) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_not_the_checkout_and_small(wheel: Path) -> None:
    package = Path(emssd.__file__).parent
    assert package.parent.name == "site-packages"
    assert conf_dir() == package / "conf"
    assert distribution("emssd").version == emssd.__version__
    assert wheel.stat().st_size < 25 * MEGABYTE


def test_the_wheel_holds_the_marker_the_presets_and_the_demo(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "emssd/py.typed",
        "emssd_heads/py.typed",
        "emssd_testing/py.typed",
        "emssd/conf/config.yaml",
        "emssd/conf/backend/unpad_kv.yaml",
    } <= set(names)
    for model in ("target", "draft"):
        assert f"emssd/data/demo/weights/{model}/model.safetensors" in names
        assert f"emssd/data/demo/weights/{model}/tokenizer.json" in names
    ours = [name for name in names if not name.startswith("emssd_testing/authoring/templates/")]  # with tests
    assert ours != names
    assert not [name for name in names if name.startswith("tools") or "muon" in name]  # the demo's trainer
    assert not [name for name in ours if name.startswith("tests") or "/tests/" in name or name.endswith(".pyc")]


def test_every_plugin_loads() -> None:
    registry = Registry()
    mine = [record for record in registry.records if record.distribution == "emssd"]
    assert [record for record in mine if record.state == "failed"] == []
    assert {point.name for point in entry_points(group="emssd")} >= {"builtin", "llma", "none", "padded", "ragged"}


def test_every_preset_composes_and_none_was_left_behind() -> None:
    paths = [path for path in conf_dir().glob("*/*.yaml") if path.parent.name != "sweep"]  # parts of experiments
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert {path.parent.name for path in paths} == groups - {"sweep"} >= {"backend", "data", "drafter", "model"}
    assert list((conf_dir() / "sweep").glob("*.yaml"))
    for path in paths:
        group, name = path.parent.name, path.stem
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            assert group in hydra.compose("config", [f"{group}={name}"]), path


def test_the_console_scripts_work(tmp_path: Path) -> None:
    shown = run(BIN / "emssd", "--help", cwd=tmp_path)
    assert "\n    cascade               several drafters in turn" in shown
    assert "experiment  ablation, acceptance, appendix, crossover" in shown
    assert "llma" in run(BIN / "emssd-plugins", cwd=tmp_path)


def test_the_demo_decodes_and_checks_itself(tmp_path: Path) -> None:
    run(
        BIN / "python", "-m", "emssd", "data.limit=4", "max_new_tokens=16", "check=greedy", "output_dir=out",
        "progress=false", cwd=tmp_path,
    )  # fmt: skip
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_prompts"] == 4
    assert metrics["check"]["differences"] == 0
    assert len((tmp_path / "out" / "generations.jsonl").read_text().splitlines()) == 4


def test_shells_can_complete_options_and_names() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run([*EMSSD, "-sc", f"install={shell}"], capture_output=True, text=True, check=True)
        assert "hydra" in done.stdout, shell
        assert not done.stderr, shell
    line = {"COMP_LINE": "emssd drafter=llm", "COMP_POINT": "17"}
    done = subprocess.run([*EMSSD, "-sc", "query=bash"], capture_output=True, text=True, check=True, env=line)
    assert "drafter=llma" in done.stdout.split()
