"""The folder of a run: results as they come, one flushed JSON line per finished row, so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import msgspec

from emssd.cli.config import STDOUT, changed_options
from emssd.cli.lines_file import LinesFile, whole_file
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.data.typed import object_in, read_json
from emssd.errors import ConfigError, OutputError
from emssd.sequences import FinishReason, Generation, TokenLogprob

__all__ = ["OutputFolder", "as_asked", "record_of"]

_SYNC_SECONDS = 5.0


class _Row(msgspec.Struct):
    id: str
    prompt: str | list[Any]
    text: str | None
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_steps: int
    acceptance_length: float
    sample: Annotated[int, msgspec.Meta(ge=0)] = 0
    made_with: dict[str, Any] = {}

    def name(self) -> str:
        return f"the id {self.id!r}" + (f" and the sample {self.sample}" if self.sample else "")


class OutputFolder:
    """``generations.jsonl``, ``errors.jsonl``, ``metrics.json`` and ``config.yaml`` of a run; see `LinesFile.earlier`.

    Rows of an earlier run are read at once, and cut off when the first row is ready. Without a row, a folder that is
    made here goes again.

    Args:
        path: ``-`` is none: rows go to stdout, and nothing is kept.
        answers: names of files that are made of the rows, and go with them.

    Attributes:
        finished, made_with: of the rows that are kept, by id and sample, their prompt and what they were made with, as
            in ``generations.jsonl``; the latter is empty for rows of earlier versions.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, overwrite: bool = False, answers: Iterable[str] = ()
    ) -> None:
        self.path = path
        self._made_of_rows = ["metrics.json", *answers]
        self._config: str | None = None
        self._failed: Sequence[FailedPrompt] = ()
        self._describe: Callable[[Prompt], Mapping[str, Any]] = lambda _: {}
        self.finished: dict[tuple[str, int], Any] = {}
        self.made_with: dict[tuple[str, int], Mapping[str, Any]] = {}
        self.is_stdout = str(path) == STDOUT
        if self.is_stdout:
            self._rows: LinesFile | _Stdout = _Stdout()
            return
        self._rows = LinesFile(path / "generations.jsonl", sync_seconds=_SYNC_SECONDS)
        for _, row in self._rows.earlier("run", _Row, _Row.name, resume=resume, overwrite=overwrite):
            key = row.id, row.sample
            self.finished[key], self.made_with[key] = row.prompt, row.made_with

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def changed_options(self, config: str) -> list[str]:
        """The options of `changed_options` between the run whose rows are kept and `config`."""
        try:
            path = self.path / "config.yaml"
            is_pipe = path.exists() and not path.is_file()  # which would be waited for
            return changed_options("" if is_pipe else path.read_text(encoding="utf-8"), config)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            why = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            raise OutputError(
                f"resume=true: {self.path} holds rows, but its config.yaml cannot be read "
                f"({getattr(error, 'strerror', why)}), which tells how they were made; overwrite=true starts again"
            ) from error

    def begin(
        self, config: str, failed: Sequence[FailedPrompt], made_with: Callable[[Prompt], Mapping[str, Any]]
    ) -> None:
        """From the first row on, the folder is of a run with this ``config.yaml`` and these prompts that failed."""
        self._config, self._failed, self._describe = config, failed, made_with

    def write_generation(self, prompt: Prompt, generation: Generation) -> None:
        record = {"id": prompt.prompt_id, "prompt": as_asked(prompt)} | record_of(generation)
        self._replace_earlier()
        self._rows.append(_line(record | {"made_with": self._describe(prompt)}))

    def _replace_earlier(self) -> None:
        """Cut off what is not kept, drop what would not fit the new rows, and write ``config.yaml``."""
        if self._config is None:
            return
        try:
            self._rows.cut()
        except OSError as error:
            raise OutputError(
                f"cannot write to output_dir={self.path}: {error.strerror}; set output_dir to a writable folder"
            ) from error
        for name in filter(None, self._made_of_rows):
            self._remove(name)
        self._write("config.yaml", self._config.encode())
        self.write_errors(self._failed)
        self._config = None

    def write_errors(self, failed: Iterable[FailedPrompt]) -> None:
        """Write ``errors.jsonl``; without failures there is none."""
        if lines := [_line({"id": item.prompt_id, "error": item.error}) for item in failed]:
            self._write("errors.jsonl", b"".join(lines))
        else:
            self._remove("errors.jsonl")

    def read_metrics(self) -> dict[str, Any]:
        """The ``metrics.json`` that is there; empty if the run was interrupted before it was written."""
        return object_in(self.path / "metrics.json")

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Write ``metrics.json``, which tells that all rows are there. Raises OutputError: they are not."""
        self._rows.check()
        self._write("metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())

    def write_answers(self, name: str, lines: Iterable[bytes]) -> None:
        """Write the file `name` whole, or not at all."""
        with whole_file(self.path / name) as file:
            file.writelines(lines)

    def answered(self, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, list[dict[str, Any]]]]:
        """Each of `prompts` that has rows, with these in the order of their samples."""
        path, end = self.path / "generations.jsonl", 0
        starts = defaultdict[str, list[tuple[int, int]]](list)  # there may be more rows than memory has room for
        with path.open("rb") if path.exists() else BytesIO() as file:  # all prompts may have failed
            for line in file:
                row = read_json(line)
                starts[row["id"]].append((row.get("sample", 0), end))
                end += len(line)
            for prompt in prompts:
                rows = []
                for _, start in sorted(starts.get(prompt.prompt_id, ())):
                    file.seek(start)
                    rows.append(read_json(file.readline()))
                if rows:
                    yield prompt, rows

    def _write(self, name: str, content: bytes) -> None:
        if not self.is_stdout:
            with whole_file(self.path / name) as file:
                file.write(content)

    def _remove(self, name: str) -> None:
        try:
            if not self.is_stdout:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot remove {self.path / name}: {error.strerror}; take it away, or set output_dir to another folder"
            ) from error


class _Stdout:
    """Stands in for a `LinesFile` whose lines go to stdout."""

    def append(self, line: bytes) -> None:
        """Write one line, in ASCII: the encoding of stdout may be any. Raises OutputError: nobody reads on, say."""
        if sys.stdout is not None:
            sys.stdout.write(f"{json.dumps(json.loads(line))}\n")
            sys.stdout.flush()
        if (error := getattr(sys.stdout, "error", None)) or sys.stdout is None:  # as `steady` keeps it
            raise OutputError(f"stdout takes no more rows: {error.strerror if error else 'it is closed'}")

    def cut(self) -> None:
        """There are no earlier lines."""

    check = close = cut


def record_of(generation: Generation) -> dict[str, Any]:
    """The fields of a row in ``generations.jsonl``, apart from its prompt and from what it was made with."""
    record: dict[str, Any] = {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason.value,
        "num_prompt_tokens": len(generation.prompt_ids),
        "num_steps": generation.num_steps,
        "acceptance_length": generation.acceptance_length,
    }
    if generation.seed is not None:
        record |= {"seed": generation.seed, "sample": generation.sample}
    if generation.logprobs is not None:
        record["logprobs"] = [_logprob(token) for token in generation.logprobs]
    return record


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    """One token in ``generations.jsonl``. JSON has neither NaN nor infinity, so these are ``null``."""

    def number(share: float) -> float | None:
        return share if math.isfinite(share) else None

    top = [[other, number(share)] for other, share in token.top]
    return {"token_id": token.token_id, "logprob": number(token.logprob), "top": top}


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
