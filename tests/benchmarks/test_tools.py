"""Tools beside the benchmarks: CUDA's toolkit, kernels built ahead, and the sweep of models."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from emssd.model.hf import probe
from emssd.model.run import target
from tests.benchmarks.conftest import BENCHMARKS

NOWHERE = Path("/nowhere")


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(folder: Path) -> Path:
    program(folder / "bin" / "nvcc")
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    return folder


def test_nvcc_on_the_path_may_be_a_link_or_a_wrapper(load: Any, tmp_path: Path) -> None:
    find, real = load("cuda_toolkit").cuda_home, toolkit(tmp_path / "cuda-13")
    links, wrappers, broken = tmp_path / "links", tmp_path / "wrappers", tmp_path / "broken"
    links.mkdir()
    (links / "nvcc").symlink_to(real / "bin" / "nvcc")
    program(wrappers / "nvcc", f"echo '#$ _HERE_={real}/bin' >&2; echo '#$ TOP={real}/bin/..' >&2")
    program(broken / "nvcc", "exit 1")
    assert find({"PATH": f"{links}:/bin"}, NOWHERE) == real
    assert find({"PATH": f"{wrappers}:/bin"}, NOWHERE) == real
    assert find({"PATH": f"{broken}:/bin"}, NOWHERE) is None


def test_a_runtime_that_came_as_a_wheel_is_linked_too(load: Any, tmp_path: Path) -> None:
    home, wheel, links = toolkit(tmp_path / "cuda"), tmp_path / "site/nvidia/cu13/lib", tmp_path / "links"
    wheel.mkdir(parents=True)
    for name in ("libcudart.so.13", "libcuda.so.1"):
        (wheel / name).touch()
    assert load("cuda_toolkit").prepare_links(links, home, [wheel], [])
    assert {link.name: link.resolve().name for link in links.iterdir()} == {
        "libcudart.so": "libcudart.so.13",
        "libcuda.so": "libcuda.so.1",
    }


def test_without_a_driver_one_can_link_for_another_machine(load: Any, tmp_path: Path) -> None:
    home, links = toolkit(tmp_path / "cuda"), tmp_path / "links"
    assert load("cuda_toolkit").prepare_links(links, home, [], [])
    (tmp_path / "a.c").write_text("int cuInit(unsigned); int f(void) { return cuInit(0); }\n")
    files = ["-x", "c", str(tmp_path / "a.c"), "-o", str(tmp_path / "a.so")]
    subprocess.run(["c++", "-shared", "-fPIC", *files, "-Wl,--no-as-needed", f"-L{links}", "-lcuda"], check=True)
    assert b"libcuda.so.1" in (tmp_path / "a.so").read_bytes()


def test_a_shell_can_evaluate_what_it_prints(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "with space")
    script = shlex.join([sys.executable, str(BENCHMARKS / "cuda_toolkit.py"), str(tmp_path / "links")])
    printed = subprocess.run(
        ["bash", "-c", f'eval "$({script})"; printf %s "$CUDA_HOME"'],
        env=os.environ | {"CUDA_HOME": str(home)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == str(home)


@dataclass
class Spec:
    """The used part of `flashinfer.jit.core.JitSpecNvcc`."""

    name: str
    folder: Path
    fails: bool = False
    loadable: tuple[bytes, ...] = (b"built",)
    built: list[bool] = field(default_factory=list)

    @property
    def aot_path(self) -> Path:
        return self.folder / "aot" / self.name / f"{self.name}.so"

    @property
    def jit_library_path(self) -> Path:
        return self.folder / "cached_ops" / self.name / f"{self.name}.so"

    def build(self, verbose: bool | None = None, need_lock: bool = False) -> None:
        self.built.append(need_lock)
        if self.fails:
            raise RuntimeError("Ninja build failed.")
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_bytes(b"built")

    def try_load(self) -> object | None:
        return object() if self.aot_path.exists() and self.aot_path.read_bytes() in self.loadable else None


def build(load: Any, keep: Path, *specs: Spec, check: bool = True) -> dict[str, str]:
    outcomes: dict[str, str] = load("kernels_ahead").build({spec.name: spec for spec in specs}, keep, 4, load=check)
    return outcomes


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")  # `build` sets it, and it must be gone afterwards


def test_a_built_module_is_put_where_it_loads_from_and_kept_and_not_built_again(load: Any, tmp_path: Path) -> None:
    spec = Spec("a", tmp_path / "one")
    assert build(load, tmp_path / "keep", spec) == {"a": f"built in 0 s, as there is no {tmp_path / 'keep' / 'a.so'}"}
    assert spec.built == [True], "built once, and under FlashInfer's lock"
    assert spec.try_load() is not None
    assert (tmp_path / "keep" / "a.so").read_bytes() == b"built"
    elsewhere = Spec("a", tmp_path / "two")
    assert build(load, tmp_path / "keep", elsewhere) == {"a": "kept"}
    assert elsewhere.try_load() is not None
    assert build(load, tmp_path / "other", elsewhere) == {"a": "there already"}
    assert (tmp_path / "other" / "a.so").is_file()
    assert not elsewhere.built


def test_one_that_fails_stops_no_other(load: Any, tmp_path: Path) -> None:
    specs = [Spec("a", tmp_path, fails=True), Spec("b", tmp_path), Spec("c", tmp_path, loadable=())]
    outcomes = build(load, tmp_path / "keep", *specs)
    assert outcomes["a"] == "FAILED: Ninja build failed."
    assert outcomes["b"].startswith("built in 0 s")
    assert outcomes["c"].startswith("FAILED: ")
    assert [file.name for file in (tmp_path / "keep").iterdir()] == ["b.so"]
    assert not specs[2].aot_path.exists()


@pytest.mark.parametrize(
    ("model_type", "variant", "outcome", "reason"),
    [
        ("opt", "default", "served", ""),
        ("gemma2", "default", "served", ""),
        ("phimoe", "windows", "served", ""),
        ("qwen2_moe", "features", "served", ""),
        ("gemma4_text", "shared", "served", ""),
        ("got_ocr2", "default", "served", ""),  # hands logits_to_keep to its attention
        ("lfm2", "default", "served", ""),
        ("qwen3_5", "default", "served", ""),  # linear attention, in a model for images
        ("llama4_text", "full", "refused", "counts the tokens of a call|other logits when sequences are packed"),
        ("llama4_text", "one chunk", "served", ""),
        ("bloom", "default", "refused", "ALiBi"),
    ],
)
def test_a_tiny_model_is_right_or_refused(load: Any, model_type: str, variant: str, outcome: str, reason: str) -> None:
    with torch.random.fork_rng():
        result = load("model_sweep").sweep_one(model_type, variant)
    assert (result.outcome, result.num_wrong) == (outcome, 0), result
    assert re.search(reason, result.reason) if reason else not result.reason
    assert outcome != "served" or result.num_accepted > 50


def test_wrong_tokens_are_told(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "learn_windows", lambda _: {})
    monkeypatch.setattr(probe, "_compare", lambda *_: None)
    with torch.random.fork_rng():
        result = load("model_sweep").sweep_one("phimoe", "windows")
    assert result.outcome == "wrong"
    assert result.num_wrong > 2  # four rows are longer than the window


def test_every_type_has_a_tiny_config_or_says_why_not(load: Any) -> None:
    tiny = load("tiny_configs")
    config = tiny.build_config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]  # one of each kind
    assert (config.sliding_window, config.vocab_size, config.num_hidden_layers) == (7, tiny.VOCAB_SIZE, 2)
    assert tiny.build_config("gpt2", "windows") is None
    assert tiny.build_config("mistral", "windows").sliding_window == 6
    assert len(tiny.causal_lm_types()) > 150


def test_the_page_is_that_of_the_results_and_nothing_is_wrong(load: Any) -> None:
    module = load("model_page")
    results = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(results)
    assert not [case for case in results["cases"] if case["outcome"] in ("wrong", "failed")]
    assert {case["model_type"] for case in results["cases"]} >= {"llama", "phimoe", "gpt_oss", "whisper"}
