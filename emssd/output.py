"""Writes results as they come: one JSON line per finished row, flushed, so that an interrupted run loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from emssd.engine import Generation
from emssd.errors import OutputError

__all__ = ["OutputFolder"]


class OutputFolder:
    """The folder of a run: ``generations.jsonl``, ``metrics.json``, ``config.yaml``.

    Args:
        path: made if it does not exist.
        config: text for ``config.yaml``.

    Raises:
        OutputError: it cannot be written, at once or later (disk full).
    """

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "metrics.json").unlink(missing_ok=True)  # of an earlier run; it would not fit the new rows
            (path / "config.yaml").write_text(config, encoding="utf-8")
            self._generations = (path / "generations.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write to output_dir={path}: {error.strerror}; set output_dir to a writable folder"
            ) from error

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

    def write_generation(self, prompt_id: str, prompt: str, generation: Generation) -> None:
        """Append one finished row."""
        record = {
            "id": prompt_id,
            "prompt": prompt,
            "text": generation.text,
            "token_ids": list(generation.token_ids),
            "finish_reason": generation.finish_reason.value,
            "num_prompt_tokens": len(generation.prompt_ids),
            "num_steps": generation.num_steps,
            "acceptance_length": generation.acceptance_length,
        }
        try:
            self._generations.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._generations.flush()
        except OSError as error:
            raise OutputError(
                f"cannot write {self._generations.name}: {error.strerror}; the rows before are kept. "
                f"Make room, or set output_dir to another disk"
            ) from error

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Write ``metrics.json``."""
        path = self.path / "metrics.json"
        try:
            path.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; the rows are in {self.path}") from error
