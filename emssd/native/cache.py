"""The cache of compiled code: folders that nobody else can write, and entries that are whole.

What lies there runs with the rights of this process. So an entry is read only if nobody but this user and root could
have put it there, and only if it is complete: loading a truncated library crashes the process silently.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emssd.errors import EmssdError
from emssd.errors.files import atomic_folder, lock

__all__ = ["CacheError", "Entry", "cache_dir", "entry", "is_kept", "room_hint", "trusted"]

_MANIFEST = "manifest.json"

logger = logging.getLogger("emssd")


class CacheError(EmssdError):
    """The cache of compiled code cannot be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Files that belong together.

    Attributes:
        files: the content of each by its name, as it was checked.
        new: whether they were written just now.
    """

    folder: Path
    files: dict[str, bytes]
    new: bool


def cache_dir() -> Path:
    """The folder of what is compiled: ``$EMSSD_CACHE``, else ``$XDG_CACHE_HOME/emssd``, else ``~/.cache/emssd``."""
    chosen = os.environ.get("EMSSD_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "emssd"
    except RuntimeError as error:
        raise CacheError("this user has no home folder; set EMSSD_CACHE to a folder for what is compiled") from error


def entry(kind: str, key: str, write: Callable[[Path], None], *, replace: bool = False) -> Entry:
    """The entry of that key, written first if there is none that is whole.

    Processes that ask for the same one wait for the first of them. One that is killed leaves nothing that is read.

    Args:
        write: puts its files into an empty folder; what it raises is passed on.
        replace: whether it is written anew in any case.

    Raises:
        CacheError: others than this user could change what is there, or it cannot be written.
    """
    try:
        folder = trusted(cache_dir(), kind, key)
        if not replace and (found := _read(folder)) is not None:
            return found
        _make(folder.parent)
        trusted(cache_dir(), kind, key)  # again: in /tmp, others too can make folders that were not there
        with _alone(folder) as alone:
            if not replace and (found := _read(folder)) is not None:  # another process was faster
                return found
            if folder.exists() and not replace:
                logger.warning("%s is not as it was written, and is made again", folder)
            return _write(folder, write, sweep=alone)
    except OSError as error:
        raise _unusable(error) from error


def is_kept(kind: str, key: str) -> bool:
    """Whether there is an entry of that key; `entry` tells whether it is whole. Nobody is waited for."""
    return trusted(cache_dir(), kind, key).is_dir()


def trusted(root: Path, *below: str, variable: str = "EMSSD_CACHE") -> Path:
    """The folder `below` `root` without symbolic links, once only this user and root can change what is there.

    Folders that are not there yet are nobody's. Above `root`, a sticky folder such as ``/tmp`` will do.

    Raises:
        CacheError: others can.
    """
    root = Path(os.path.realpath(root))
    folder = root.joinpath(*below)
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise CacheError(f"{path} is no folder; set {variable} to one that can be written")
            _check(path, found, variable, above=path in root.parents)
    return folder


def room_hint(error: BaseException) -> str:
    """Advice for a full disk, to be put after the error; nothing for other errors."""
    if "No space left on device" not in str(error):
        return ""
    return "; make room on the disk, or set EMSSD_CACHE, TMPDIR and TORCHINDUCTOR_CACHE_DIR to where some is"


def _check(path: Path, found: os.stat_result, variable: str, *, above: bool = False) -> None:
    """Refuse what others than this user and root own or may write."""
    if not hasattr(os, "geteuid"):  # not POSIX
        return
    trustees = {0, os.geteuid()}
    if above:  # in a container, root may go by another number there
        trustees.add(os.stat("/").st_uid)
    risk = f"and what lies there would run as {_user(os.geteuid())}"
    way_out = f"set {variable} to a folder of your own"
    if found.st_uid not in trustees:
        raise CacheError(f"{path} belongs to {_user(found.st_uid)}, {risk}; {way_out}")
    mode = stat.S_IMODE(found.st_mode)
    if above and mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(found.st_gid)):
        raise CacheError(f"{path} can be changed by other users (mode {mode:04o}), {risk}; chmod go-w it, or {way_out}")


def _is_private(group: int) -> bool:
    """Whether no other user is in this group: many systems give each user one, and let it write."""
    import grp
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return group == 0
    return found.gr_name in {"root", user} and set(found.gr_mem) <= {"root", user}


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _read(folder: Path) -> Entry | None:
    """The entry in `folder`, if all of it is there as it was written."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        files = {path.name: _content(path) for path in sorted(folder.iterdir())}
        if files.pop(_MANIFEST, None) == _manifest(folder, files):
            return Entry(folder, files, new=False)
    return None


def _manifest(folder: Path, files: dict[str, bytes]) -> bytes:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return json.dumps({"entry": f"{folder.parent.name}/{folder.name}", "files": hashes}, indent=1).encode()


def _content(path: Path) -> bytes:
    """The content of a file that nobody else can write."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        _check(path, os.fstat(file.fileno()), "EMSSD_CACHE")
        return file.read()


def _write(folder: Path, write: Callable[[Path], None], *, sweep: bool) -> Entry:
    """Let `write` fill a folder of this process's own, and put it into its place when all of it is on disk."""
    if sweep:
        for leftover in folder.parent.glob(f"{folder.name}-*"):  # of processes that were killed
            shutil.rmtree(leftover, ignore_errors=True)
    with atomic_folder(folder, mode=0o700, replace=True) as scratch:
        write(scratch)
        files = {path.name: path.read_bytes() for path in sorted(scratch.iterdir())}
        (scratch / _MANIFEST).write_bytes(_manifest(folder, files))
        for path in scratch.iterdir():
            path.chmod(0o600)
            _to_disk(path)
        _to_disk(scratch)
    _to_disk(folder.parent)
    return Entry(folder, files, new=True)


def _make(folder: Path) -> None:
    """Like ``mkdir -p``, but each new folder is this user's alone."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """While one process writes an entry, others wait; a killed one's turn ends with it. False: there are no locks."""
    file = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            alone = lock(file)
        except BlockingIOError:
            logger.info("another process makes %s; waiting for it …", folder)
            alone = lock(file, wait=True)
        yield alone
    finally:
        os.close(file)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(error: OSError) -> CacheError:
    path = error.filename or cache_dir()
    return CacheError(f"{path}: {error.strerror or error}; set EMSSD_CACHE to a folder that can be written")
