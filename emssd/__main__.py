"""The command ``emssd``, and ``python -m emssd``: the first thing it does is to make sure that it can end quietly."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from emssd.cli.terminal import steady

__all__ = ["main"]


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage seldom: imports leave none, and looking through what they make takes a sixth of their time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _spin_briefly() -> None:
    """Let a thread of PyTorch that waits for others sleep after 3,000 spins; libgomp's default is 300,000.

    On a busy machine, a spinning thread takes the core of the thread that it waits for. libgomp reads the variable when
    torch is imported. A user's own setting stays. Measured in ``docs/performance.md``.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@steady("emssd")
@_few_collections()
def main() -> None:
    """Run the command line; `emssd.cli.command.main` says with which status it exits."""
    _spin_briefly()
    from emssd.cli import (
        command as cli,  # here, because it brings Hydra: Ctrl-C while that is imported is dealt with already
    )

    cli.main()


if __name__ == "__main__":
    main()
