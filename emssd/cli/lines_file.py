"""Files that are never half written: one of JSON lines that one process at a time appends to, and whole ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from emssd.data.typed import read_json, typed
from emssd.errors import OutputError

__all__ = ["LinesFile", "whole_file"]

_Row = TypeVar("_Row")


class LinesFile:
    """Lines that are there stay as they are until the first new one is written. The folder is made if need be.

    A line that is written survives the end of this process, also by ``kill -9``; only a crash of the machine can take
    it, until it is forced to the disk.

    Args:
        sync_seconds: how often lines are forced to the disk. It takes 0.2 ms on a local SSD and some ten on a network.
    """

    def __init__(self, path: Path, *, sync_seconds: float = 0.0) -> None:
        self.path = path
        self._sync_seconds = sync_seconds
        self._synced = time.monotonic()
        self._kept_bytes = 0
        self._is_cut = False  # from then on, the file holds what is kept, and nothing else
        self._made = list[Path]()
        try:
            self._made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened_alone(path)
        except (OSError, RecursionError) as error:
            self._remove_folders()
            if isinstance(error, OutputError):
                raise
            why = getattr(error, "strerror", "too many folders in folders")
            why = "there is a file of this name" if isinstance(error, FileExistsError) else why
            raise OutputError(
                f"cannot write to output_dir={path.parent!s:.300}: {why}; set output_dir to a writable folder"
            ) from error

    @property
    def _is_empty(self) -> bool:
        return not os.fstat(self._file.fileno()).st_size

    def earlier(
        self, job: str, kind: type[_Row], name: Callable[[_Row], str], *, resume: bool, overwrite: bool
    ) -> Iterator[tuple[Any, _Row]]:
        """The rows that are there, as JSON and as `kind`: with `resume` all are kept, with `overwrite` none.

        It is an error if there are some and neither flag is set, or, with `resume`, if a line is no row. The file is
        closed then.

        Args:
            job: what wrote the rows, for errors: ``run``.
            name: of a row, which tells it from the others: ``the id 'a'``.
        """
        try:
            if resume:
                yield from self._kept(kind, name)
            elif not self._is_empty and not overwrite:
                raise OutputError(
                    f"output_dir={self.path.parent} holds the rows of an earlier {job}; resume=true goes on with it, "
                    f"overwrite=true replaces it, or set output_dir to another folder"
                )
        except OutputError:
            self.close()
            raise

    def _kept(self, kind: type[_Row], name: Callable[[_Row], str]) -> Iterator[tuple[Any, _Row]]:
        lines: dict[str, int] = {}
        for number, line in enumerate(self.keep(), start=1):
            where, way_out = f"resume=true: {self.path}:{number}", "or start again with overwrite=true"
            try:
                value = _value(line)
                row = typed(value, kind)
            except ValueError as error:
                raise OutputError(
                    f"{where} is no row: {error}; take that line out, and its row is made again, {way_out}"
                ) from None
            if first := lines.get(named := name(row)):
                again = f"a second row with {named}, after line {first}"
                raise OutputError(f"{where} is {again}; take one of the two out, {way_out}")
            lines[named] = number
            yield value, row

    def keep(self) -> list[bytes]:
        """Keep all whole lines, and return them; what follows the last newline was being written in a crash."""
        self._file.seek(0)
        content = self._file.readall()
        self._kept_bytes = content.rfind(b"\n") + 1
        return content[: self._kept_bytes].split(b"\n")[:-1]

    def cut(self) -> None:
        """Drop what an earlier run left and is not kept. Raises OSError: that does not work."""
        if not self._is_cut and os.fstat(self._file.fileno()).st_size > self._kept_bytes:
            self._file.truncate(self._kept_bytes)
        self._is_cut = True

    def check(self) -> None:
        """Make sure that the file is as this process left it, if it has changed it. Raises OutputError: something else
        has removed or replaced it, cut it short, or written to it.
        """
        size = os.fstat(self._file.fileno()).st_size
        if not self._is_cut or ((is_there := is_at(self.path, self._file.fileno())) and size == self._kept_bytes):
            return
        what = "is no longer there" if not is_there else "was cut short" if size < self._kept_bytes else "has grown"
        raise OutputError(
            f"{self.path} {what}, and not by this run, so that rows may be lost; resume=true makes those anew that are "
            f"missing"
        )

    def append(self, line: bytes) -> None:
        """Write one line, which ends with a newline, after those that are kept. Raises OutputError: the disk is full,
        say, and nothing of the line is left then; or as `check` says.
        """
        rest = memoryview(line)
        self.check()
        try:
            self.cut()
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._kept_bytes)
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; the rows before are kept. "
                f"Make room, and go on with resume=true"
            ) from error
        self._kept_bytes += len(line)
        if (now := time.monotonic()) - self._synced >= self._sync_seconds:
            os.fsync(self._file.fileno())
            self._synced = now

    def close(self) -> None:
        """Let others write to it. If it is empty, it goes, and so do the folders that were made for it."""
        if self._file.closed:
            return
        with suppress(OSError):  # a system that keeps files that are open
            if self._is_empty and self.path.is_file() and is_at(self.path, self._file.fileno()):
                self.path.unlink()
        with suppress(OSError):  # of a line that could not be written, which `append` has said
            self._file.close()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the folders that were made for the file, from the inmost on, as far as they are empty."""
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the body ends; if that fails, `path` stays as it was.

    Raises OutputError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError):
            raise
        raise OutputError(
            f"cannot write {path}: {error.strerror}; finished rows stay in {path.parent}, and resume=true keeps them"
        ) from error


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


def _opened_alone(path: Path) -> FileIO:
    """Open `path` to be read and appended to, and locked until it is closed or this process ends."""
    while True:
        with ExitStack() as opened:
            file = opened.enter_context(FileIO(path, "a+"))
            if not file.seekable():
                raise OutputError(
                    f"{path} is a pipe, and rows go to a file; take it away, or set output_dir to another folder, or "
                    f"to - for stdout"
                )
            try:
                lock(file.fileno())
            except BlockingIOError as error:
                raise OutputError(
                    f"output_dir={path.parent} is being written by another run; wait for it, or set output_dir to "
                    f"another folder"
                ) from error
            if is_at(path, file.fileno()):  # else whoever had the lock has removed it since it was opened here
                opened.pop_all()
                return file


def _value(line: bytes) -> Any:
    try:
        return read_json(line)
    except ValueError:
        raise ValueError("it is not JSON") from None
