"""The folder of a run: results as they come, one flushed JSON line per finished row, so that a crash loses nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from emssd.errors import OutputError
from emssd.generation import Generation
from emssd.prompts import FailedPrompt, Prompt

__all__ = ["OutputFolder", "as_asked", "lock"]

# A row that is flushed survives the end of this process, also by kill -9; only a crash of the machine can take it.
# Against that, rows are forced to the disk, but not each: that takes 0.2 ms on a local SSD and some ten on a network.
_SYNC_SECONDS = 5.0


class OutputFolder:
    """``generations.jsonl``, ``errors.jsonl``, ``metrics.json`` and ``config.yaml`` of a run.

    What an earlier run left is read at once, and changed only from `begin` on.

    Args:
        path: made if it does not exist.
        resume: keep the rows that are there.
        overwrite: replace what is there.

    Attributes:
        finished: the prompts of the rows that are kept, by id, as in ``generations.jsonl``.

    Raises:
        OutputError: it cannot be written, at once or later (disk full); another run writes to it; or it holds rows,
            and neither `resume` nor `overwrite` says what to do with them.
    """

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._generations = (path / "generations.jsonl").open("a+b")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            lock(self._generations.fileno(), path)
            self._kept_bytes = 0
            self.finished: dict[str, Any] = {}
            if os.fstat(self._generations.fileno()).st_size:
                if resume:
                    self._kept_bytes, self.finished = self._read()
                elif not overwrite:
                    raise OutputError(
                        f"output_dir={path} holds the rows of an earlier run; resume=true goes on with it, "
                        f"overwrite=true replaces it, or set output_dir to another folder"
                    )
        except BaseException:
            self._generations.close()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._generations.close()
        except OSError as failed:
            if error is None:
                raise OutputError(f"cannot finish {self._generations.name}: {failed.strerror}") from failed

    @property
    def earlier_config(self) -> str:
        """Text of the ``config.yaml`` of the run whose rows are kept.

        Raises:
            OutputError: there is none.
        """
        try:
            return (self.path / "config.yaml").read_text(encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"resume=true: {self.path} holds rows, but its config.yaml cannot be read ({error.strerror}), which "
                f"tells how they were made; overwrite=true starts again"
            ) from error

    def begin(self, config: str) -> None:
        """Cut off what is not kept, drop the metrics, which would not fit the new rows, and write ``config.yaml``."""
        try:
            if os.fstat(self._generations.fileno()).st_size > self._kept_bytes:
                self._generations.truncate(self._kept_bytes)
            (self.path / "metrics.json").unlink(missing_ok=True)
            _replace(self.path / "config.yaml", config.encode())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write_generation(self, prompt: Prompt, generation: Generation) -> None:
        """Append one finished row."""
        record = {
            "id": prompt.prompt_id,
            "prompt": as_asked(prompt),
            "text": generation.text,
            "token_ids": list(generation.token_ids),
            "finish_reason": generation.finish_reason.value,
            "num_prompt_tokens": len(generation.prompt_ids),
            "num_steps": generation.num_steps,
            "acceptance_length": generation.acceptance_length,
        }
        try:
            self._generations.write(_line(record))
            self._generations.flush()
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._generations.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise OutputError(
                f"cannot write {self._generations.name}: {error.strerror}; the rows before are kept. "
                f"Make room, or set output_dir to another disk"
            ) from error

    def write_errors(self, failed: Iterable[FailedPrompt]) -> None:
        """Write ``errors.jsonl``; without failures there is none."""
        if lines := [_line({"id": item.prompt_id, "error": item.error}) for item in failed]:
            self._write("errors.jsonl", b"".join(lines))
        else:
            (self.path / "errors.jsonl").unlink(missing_ok=True)

    def read_metrics(self) -> dict[str, Any]:
        """The ``metrics.json`` that is there; empty if the run was interrupted before it was written."""
        path = self.path / "metrics.json"
        metrics: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return metrics

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Write ``metrics.json``."""
        self._write("metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        try:
            _replace(self.path / name, content)
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path / name}: {error.strerror}; the rows are in {self.path}"
            ) from error

    def _read(self) -> tuple[int, dict[str, Any]]:
        """How many bytes of whole rows there are, and their prompts by id.

        What follows the last newline is a row that was being written when the run was killed: it is decoded again.
        """
        self._generations.seek(0)
        content = self._generations.read()
        kept = content.rfind(b"\n") + 1
        finished: dict[str, Any] = {}
        for number, line in enumerate(content[:kept].split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                finished[row["id"]] = row["prompt"]
            except (ValueError, TypeError, KeyError) as error:
                raise OutputError(
                    f"resume=true: {self._generations.name}:{number} is no row of a run; take that line out, and its "
                    f"prompt is decoded again, or start again with overwrite=true"
                ) from error
        return kept, finished


def as_asked(prompt: Prompt) -> str | list[dict[str, Any]] | list[int]:
    """The prompt as ``generations.jsonl`` has it: its text, its messages, or its token ids."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    return prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]


def _line(record: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        return (json.dumps(record) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    """Write a whole file or leave it as it was."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def lock(file: int, path: Path) -> None:
    """Keep other runs out until `file` is closed or this process ends, in whichever way."""
    try:
        import fcntl
    except ImportError:  # not a Unix system: two runs at once in one folder are the user's to avoid
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            f"output_dir={path} is being written by another run; wait for it, or set output_dir to another folder"
        ) from error
    except OSError:  # a file system without locks
        return


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to output_dir={path}: {error.strerror}; set output_dir to a writable folder")
