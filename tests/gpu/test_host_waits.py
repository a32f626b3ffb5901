"""Waits for the device are counted, in PyTorch's own words; no GPU needed."""

from __future__ import annotations

import mmap
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.host_waits import host_waits

NOTICE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
WAIT = "called a synchronizing CUDA operation"
TEXTS = {  # as PyTorch 2.11.0+cu130 words them
    NOTICE: f"{NOTICE} (Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:1003.)",
    WAIT: f"{WAIT} (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:162.)",
}
LIBRARIES = {NOTICE: "libtorch_python.so", WAIT: "libc10_cuda.so"}


def test_only_operations_that_wait_count() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for file, text in [("notice.py", NOTICE), ("step.py", WAIT), ("seen.py", WAIT)]:
            warnings.warn_explicit(TEXTS[text], UserWarning, file, 7)
        warnings.warn_explicit("the caches are synchronized", UserWarning, "other.py", 7)
    assert host_waits(caught) == ["step.py:7", "seen.py:7"]


@pytest.mark.skipif(
    torch.version.cuda is None or sys.platform != "linux", reason="only PyTorch for CUDA has them; files as on Linux"
)
@pytest.mark.parametrize("text", LIBRARIES)
def test_the_installed_pytorch_uses_these_words(text: str) -> None:
    library = Path(torch.__file__).parent / "lib" / LIBRARIES[text]
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(text.encode()) >= 0
