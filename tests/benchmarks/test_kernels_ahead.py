"""Built kernels lie where FlashInfer loads them from, and are kept; its own specs are replaced by ones that compile
nothing, as the real ones need it installed, and minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


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
    found: dict[str, str] = load("kernels_ahead").build({spec.name: spec for spec in specs}, keep, 4, load=check)
    return found


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")  # `build` sets it, and it must be gone afterwards


def test_a_built_module_is_put_where_it_loads_from_and_kept(load: Any, tmp_path: Path) -> None:
    spec = Spec("a", tmp_path / "one")
    assert build(load, tmp_path / "keep", spec) == {"a": f"built in 0 s, as there is no {tmp_path / 'keep' / 'a.so'}"}
    assert spec.built == [True], "built once, and under FlashInfer's lock"
    assert spec.try_load() is not None
    assert (tmp_path / "keep" / "a.so").read_bytes() == b"built"


def test_a_kept_module_is_not_built_again(load: Any, tmp_path: Path) -> None:
    build(load, tmp_path / "keep", Spec("a", tmp_path / "one"))
    elsewhere = Spec("a", tmp_path / "two")
    assert build(load, tmp_path / "keep", elsewhere) == {"a": "kept"}
    assert elsewhere.try_load() is not None
    assert build(load, tmp_path / "other", elsewhere) == {"a": "there already"}
    assert (tmp_path / "other" / "a.so").is_file()
    assert not elsewhere.built


def test_one_that_fails_stops_no_other(load: Any, tmp_path: Path) -> None:
    specs = [Spec("a", tmp_path, fails=True), Spec("b", tmp_path), Spec("c", tmp_path, loadable=())]
    found = build(load, tmp_path / "keep", *specs)
    assert found["a"] == "FAILED: Ninja build failed."
    assert found["b"].startswith("built in 0 s")
    assert found["c"].startswith("FAILED: ")
    assert [file.name for file in (tmp_path / "keep").iterdir()] == ["b.so"]
    assert not specs[2].aot_path.exists()
