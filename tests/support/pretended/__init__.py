"""A pretended CUDA device: GPU code is tested on a CPU. Its tensors say ``cuda:0`` and lie on the CPU.

from tests.support.pretended import PretendedCuda

with PretendedCuda() as device:
    model.to("cuda")
    ...
    assert not device.illegal, device.illegal
"""

from __future__ import annotations

from tests.support.pretended.device import PretendedCuda
from tests.support.pretended.journal import DeviceMixError

__all__ = ["DeviceMixError", "PretendedCuda"]
