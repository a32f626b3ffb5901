"""A CUDA toolkit and the driver are found on machines that FlashInfer would not understand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        str(tmp_path / "a.c"),
        "-Wl,--no-as-needed",
        f"-L{links}",
        "-lcuda",
    ]
    subprocess.run([*command, "-o", str(tmp_path / "a.so")], check=True)
    assert b"libcuda.so.1" in (tmp_path / "a.so").read_bytes()


def test_a_shell_can_evaluate_what_it_prints(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "with space")
    script = shlex.join([sys.executable, str(BENCHMARKS / "cuda_toolkit.py"), str(tmp_path / "links")])
    printed = subprocess.run(
        ["bash", "-c", f'eval "$({script})"; printf %s "$CUDA_HOME"'],
        env=os.environ | {"CUDA_HOME": str(home)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == str(home)
