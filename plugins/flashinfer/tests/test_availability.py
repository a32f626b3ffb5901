"""Each thing that can be missing has one sentence of its own, and the first that is missing is named."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_flashinfer import FlashInferConfig, PrefillKernel, availability, emssd_attention_backends, unavailable

from emssd.attention import PagedBackend
from emssd.errors import ConfigError


class Machine:
    """A machine where all is well, until a test takes something away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.capability = (9, 0)
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


def test_nothing_is_said_where_nothing_is_missing(machine: Machine) -> None:
    assert unavailable() is None


FAULTS: dict[str, tuple[Callable[[Machine], Any], str]] = {
    "card": (lambda machine: setattr(machine, "capability", (7, 5)), "8.0 or later, and an old card has 7.5"),
    "package": (
        lambda machine: machine.modules.discard("flashinfer"),
        "FlashInfer is not installed (pip install 'emssd[",
    ),
    "module": (lambda machine: machine.modules.discard("tvm_ffi"), "installed without tvm_ffi, which it imports"),
    "old": (
        lambda machine: setattr(machine, "version", "0.6.12"),
        "0.6.12 is installed, and this version of emssd knows",
    ),
    "new": (lambda machine: setattr(machine, "version", "0.8.0"), "0.6.13 up to, but not including, 0.8.0"),
    "unknown": (lambda machine: setattr(machine, "version", None), "so its version is unknown"),
    "ninja": (lambda machine: machine.tools.discard("ninja"), "ninja is not on PATH"),
    "compiler": (lambda machine: machine.tools.discard("c++"), "there is no C++ compiler 'c++' on PATH"),
    "nvcc": (
        lambda machine: (machine.home / "bin" / "nvcc").unlink(),
        "there is no nvcc at {home}/bin/nvcc (set CUDA_HOME",
    ),
}


@pytest.mark.parametrize(("fault", "sentence"), FAULTS.values(), ids=FAULTS)
def test_what_is_missing_is_named_in_one_sentence(
    fault: Callable[[Machine], Any], sentence: str, machine: Machine
) -> None:
    fault(machine)
    said = unavailable()
    assert said is not None
    assert sentence.format(home=machine.home) in said
    assert said.endswith("use backend=ragged, which runs on any device")
    assert "\n" not in said


@pytest.mark.parametrize("version", ["0.6.13", "0.6.18.post1", "0.7.2.post1"])
def test_known_versions_are_taken(version: str, machine: Machine) -> None:
    machine.version = version
    assert unavailable() is None


def test_compiled_kernels_need_no_compiler(machine: Machine) -> None:
    machine.tools.clear()
    machine.modules.add("flashinfer_jit_cache")
    assert unavailable() is None


def test_nvcc_is_sought_where_flashinfer_seeks_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    assert "no nvcc at /bin/nvcc (set CUDA_HOME, now not set" in (unavailable() or "")  # beside /x/nvcc, found on PATH
    machine.tools.discard("nvcc")
    monkeypatch.setattr(availability, "Path", lambda path: machine.home if path == "/usr/local/cuda" else Path(path))
    assert unavailable() is None
    monkeypatch.setenv("FLASHINFER_NVCC", "/nowhere/nvcc")
    assert "no nvcc at /nowhere/nvcc" in (unavailable() or "")


@pytest.mark.parametrize("kernel", ["fa3", PrefillKernel.fa3])
def test_it_is_built_with_its_options_where_it_can_run(kernel: Any, machine: Machine) -> None:
    (spec,) = emssd_attention_backends()
    assert isinstance(spec.build(FlashInferConfig(prefill_kernel=kernel)), PagedBackend)
    with pytest.raises(ConfigError, match=r"backend\.page_size is 0"):
        spec.build(FlashInferConfig(page_size=0))


def test_fa3_is_refused_on_other_cards_than_hopper(machine: Machine) -> None:
    from emssd_flashinfer.kernels import FlashInferKernels

    from emssd.attention import KVCacheSpec, LayerSpec

    spec = KVCacheSpec((LayerSpec(4, 4, 64, 64, 1.0),), torch.float16, torch.device("cuda"), 1, 8)
    assert FlashInferKernels(384, "fa3").unsupported(spec, 16) == []
    machine.capability = (8, 0)
    assert FlashInferKernels(384, "fa2").unsupported(spec, 16) == []
    assert "needs a Hopper GPU, not an old card" in FlashInferKernels(384, "fa3").unsupported(spec, 16)[0]
