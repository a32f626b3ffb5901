"""The host's waits for the device, as PyTorch's synchronization debug mode reports them."""

from __future__ import annotations

from collections.abc import Iterable
from warnings import WarningMessage

__all__ = ["host_waits"]

_WAIT = "called a synchronizing CUDA operation"


def host_waits(caught: Iterable[WarningMessage]) -> list[str]:
    """``file:line`` of each wait among the warnings that ``torch.cuda.set_sync_debug_mode("warn")`` led to.

    The first call of that function in a process warns about the mode itself; that is no wait.
    """
    return [f"{warning.filename}:{warning.lineno}" for warning in caught if str(warning.message).startswith(_WAIT)]
