"""Each thing that can be missing has one sentence of its own, and the first that is missing is named."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_flashinfer import FlashInferConfig, availability, emssd_attention_backends, unavailable

from emssd import Engine
from emssd.attention import PagedBackend
from emssd.errors import PluginError
from emssd.hooks.registry import Registry


class Machine:
    """A machine where all is well, until a test takes something away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.capability = monkeypatch, (9, 0)
        self.modules = {*availability._MODULES}
        self.tools = {"ninja", "c++", "nvcc"}
        self.version: str | None = "0.6.18.post1"
        self.home = folder / "cuda"
        (self.home / "bin").mkdir(parents=True)
        (self.home / "bin" / "nvcc").touch()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "an old card")
        monkeypatch.setattr(availability, "find_spec", lambda name: name if name in self.modules else None)
        monkeypatch.setattr(availability, "version", self._version)
        monkeypatch.setattr(availability.shutil, "which", lambda name: f"/x/{name}" if name in self.tools else None)
        for name in ("CUDA_PATH", "CXX", "FLASHINFER_NVCC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(self.home))

    def _version(self, name: str) -> str:
        if self.version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.version


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


FAULTS: dict[str, tuple[Callable[[Machine], Any], str]] = {
    "build": (lambda machine: machine.patch.setattr(torch.version, "cuda", None), "is built without CUDA"),
    "no card": (
        lambda machine: machine.patch.setattr(torch.cuda, "is_available", lambda: False),
        "PyTorch finds none on",
    ),
    "card": (lambda machine: setattr(machine, "capability", (7, 5)), "8.0 or later, and an old card has 7.5"),
    "package": (lambda machine: machine.modules.discard("flashinfer"), "not installed (pip install 'emssd["),
    "module": (lambda machine: machine.modules.discard("tvm_ffi"), "installed without tvm_ffi, which it imports"),
    "old": (lambda machine: setattr(machine, "version", "0.6.17"), "0.6.17 is installed, and this version of emssd"),
    "new": (lambda machine: setattr(machine, "version", "0.7.0"), "0.6.18 up to, but not including, 0.7.0"),
    "unknown": (lambda machine: setattr(machine, "version", None), "so its version is unknown"),
    "ninja": (lambda machine: machine.tools.discard("ninja"), "ninja is not on PATH"),
    "compiler": (lambda machine: machine.tools.discard("c++"), "there is no C++ compiler 'c++' on PATH"),
    "nvcc": (lambda machine: (machine.home / "bin" / "nvcc").unlink(), "no nvcc at {home}/bin/nvcc (set CUDA_HOME"),
}


@pytest.mark.parametrize(("fault", "sentence"), FAULTS.values())
def test_what_is_missing_is_named_in_one_sentence(
    fault: Callable[[Machine], Any], sentence: str, machine: Machine
) -> None:
    fault(machine)
    sentences = unavailable()
    assert sentences is not None
    assert sentence.format(home=machine.home) in sentences
    assert sentences.endswith("use backend=ragged, which runs on any device")
    assert "\n" not in sentences


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.6.19"])
def test_known_versions_are_taken(version: str, machine: Machine) -> None:
    machine.version = version
    assert unavailable() is None


def test_compiled_kernels_need_no_compiler_but_a_package_without_any_does(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.tools.clear()
    package, find_spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)]), availability.find_spec
    monkeypatch.setattr(
        availability, "find_spec", lambda name: package if name == "flashinfer_jit_cache" else find_spec(name)
    )
    assert "ninja is not on PATH" in (unavailable() or "")
    (module := tmp_path / "jit_cache" / "batch_prefill_with_kv_cache_x").mkdir(parents=True)
    (module / f"{module.name}.so").touch()
    assert unavailable() is None


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"CUDA_HOME": "/nowhere"}, r"/nowhere/bin/nvcc \(set CUDA_HOME, now /nowhere,"),
        ({"CUDA_HOME": ""}, r"/bin/nvcc \(set CUDA_HOME, now not set,"),  # beside the one on PATH, as FlashInfer looks
        ({"FLASHINFER_NVCC": "/elsewhere/nvcc"}, "/elsewhere/nvcc "),
    ],
)
def test_nvcc_is_wanted_where_flashinfer_looks(
    variables: dict[str, str], place: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(f"no nvcc at {place}", unavailable() or "")


def test_it_is_built_where_it_can_run(machine: Machine) -> None:
    (spec,) = emssd_attention_backends()
    assert isinstance(spec.build(FlashInferConfig()), PagedBackend)


def test_without_cuda_everybody_who_asks_gets_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for choice in ("flashinfer", FlashInferConfig()):  # before a model is looked for
        with pytest.raises(
            PluginError, match=r"backend 'flashinfer' is not available: .*use backend=ragged.*device\.$"
        ):
            Engine.from_pretrained("/nowhere", backend=choice)
    (record,) = [record for record in Registry().records if record.name == "flashinfer"]
    assert (record.kind, record.state, record.reason) == ("backend", "unavailable", unavailable())
    (spec,) = emssd_attention_backends()
    with pytest.raises(PluginError, match="use backend=ragged"):
        spec.build(FlashInferConfig())


@pytest.mark.costly("a process of its own")
def test_importing_and_asking_loads_no_flashinfer_and_starts_no_cuda() -> None:
    code = (
        "import sys, emssd_flashinfer as plugin\n"
        "plugin.emssd_attention_backends(); plugin.unavailable()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'flashinfer']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
