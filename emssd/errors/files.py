"""Files and folders that are never half written, and locks on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

__all__ = ["atomic_file", "atomic_folder", "is_at", "lock"]


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


@contextmanager
def atomic_folder(path: Path, *, mode: int = 0o777, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `path`, which becomes `path` when the body ends.

    If that fails, `path` stays as it was; without `replace`, a folder of that name is a failure. A
    process that is killed may leave a folder ``NAME-*.part``.
    """
    part = path.with_name(f"{path.name}-{uuid4().hex[:8]}.part")
    replaced = part.with_suffix(".old")
    try:
        part.mkdir(mode)
        yield part
        if replace and path.exists():
            path.rename(replaced)
        part.rename(path)
    finally:
        for folder in (part, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def lock(file: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends. Returns whether this system has locks. Raises
    BlockingIOError: another process holds the lock, and `wait` is false.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix system: two processes at once are the user's to avoid
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True


def is_at(path: Path, file: int) -> bool:
    """Whether the open `file` is the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
