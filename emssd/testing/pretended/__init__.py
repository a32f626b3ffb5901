"""A pretended CUDA device: GPU code is tested on a CPU. Its tensors say ``cuda:0`` and lie on the CPU.

from emssd.testing import PretendedCuda

with PretendedCuda() as device:
    model.to("cuda")
    ...
    assert not device.illegal, device.illegal
"""

from __future__ import annotations

from emssd.testing.pretended.device import PretendedCuda
from emssd.testing.pretended.journal import DeviceMixError, Note
from emssd.testing.pretended.tensor import OnDevice

__all__ = ["DeviceMixError", "Note", "OnDevice", "PretendedCuda"]
