"""Files that are never half written, and locks on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "is_at", "lock"]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the body ends; if that fails, `path` stays as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def lock(file: int) -> None:
    """Lock an open file until it is closed or this process ends. Raises BlockingIOError: another process holds the
    lock. On a system without locks, two processes at once are the user's to avoid.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):  # not a Unix system, or a file system without locks
        pass


def is_at(path: Path, file: int) -> bool:
    """Whether the open `file` is the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
