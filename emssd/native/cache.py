"""The cache of compiled code: a folder that only this user can write, with entries that are whole.

Code in it runs with the rights of this process, and loading a truncated library crashes the process silently.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from emssd.errors import EmssdError

logger = logging.getLogger("emssd")


class CacheError(EmssdError):
    """The cache of compiled code cannot be used; the message says why, and what to do."""


class Entry(NamedTuple):
    """A folder of files that belong together, and whether they were written just now."""

    folder: Path
    new: bool


def cache_dir() -> Path:
    """The folder of compiled code: ``$EMSSD_CACHE``, else ``emssd`` in the user's cache folder, ``~/.cache``."""
    try:
        return Path(os.environ.get("EMSSD_CACHE") or user_cache_path("emssd")).expanduser().resolve()
    except RuntimeError as error:
        raise CacheError("this user has no home folder; set EMSSD_CACHE to a folder for what is compiled") from error


def private_folder(*names: str) -> Path:
    """The folder of these names in the cache, made for this user alone if it is not there.

    Raises CacheError: it cannot be made, or others could change the code in the cache.
    """
    root = cache_dir()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if hasattr(os, "geteuid") and (status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022):
            raise CacheError(
                f"{root} belongs to user {status.st_uid} and has mode {status.st_mode & 0o7777:04o}, so others than "
                f"user {os.geteuid()} can change the code in it; chmod go-w it, or set EMSSD_CACHE to a folder of your "
                f"own"
            )
        folder = root.joinpath(*names)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    except OSError as error:
        raise _unusable(error) from error


def entry(kind: str, key: str, write: Callable[[Path], None], *, replace: bool = False) -> Entry:
    """The entry of that key, written first if there is none, or to `replace` it.

    Processes that want the same one wait for the first of them. One that is killed leaves nothing that is read. `write`
    puts the files into an empty folder; its errors are passed on. Raises CacheError as `private_folder`.
    """
    folder = private_folder(kind) / key
    if not replace and folder.is_dir():
        return Entry(folder, new=False)
    try:
        lock = FileLock(f"{folder}.lock", mode=0o600)  # a process that is killed gives it back
        try:
            turn = lock.acquire(blocking=False)
        except Timeout:
            logger.info("another process makes %s; waiting for it …", folder)
            turn = lock.acquire()
        with turn:
            if not replace and folder.is_dir():  # another process was faster
                return Entry(folder, new=False)
            _write(folder, write)
            return Entry(folder, new=True)
    except OSError as error:
        raise _unusable(error) from error


def is_kept(kind: str, key: str) -> bool:
    """Whether there is an entry of that key. Nobody is waited for."""
    return (cache_dir() / kind / key).is_dir()


def room_hint(error: BaseException) -> str:
    """Advice for a full disk, to be put after the error; nothing for other errors."""
    full = "No space left on device" in str(error)
    return "; make room on the disk, or set EMSSD_CACHE and TMPDIR to where some is" if full else ""


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `folder`, which takes its place once all files are on the disk."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir(0o700)
    try:
        write(part)
        for path in (*part.iterdir(), part):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unusable(error: OSError) -> CacheError:
    path = error.filename or cache_dir()
    return CacheError(f"{path}: {error.strerror or error}; set EMSSD_CACHE to a folder that can be written")
