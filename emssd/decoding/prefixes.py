"""Rows whose texts begin alike: some take over KV, some wait for it, and some make theirs known."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.model import ModelRunner
from emssd.sequences import Row

__all__ = ["Prefixes"]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The KV that rows share through `runner`; none without one, or without its ``shared_kv``.

    Only committed tokens are ever published: of prompts that are computed, and of rows that leave.
    """

    runner: ModelRunner | None = None

    def adopt(self, row: Row) -> int:
        """Give a row the KV of its longest known beginning. Returns how many of its tokens need not be computed now."""
        if self.runner is None or (shared := self.runner.shared_kv) is None:
            return 0
        before = row.num_cached
        row.num_cached = shared.adopt_prefix(row.request_id, row.tokens, before)
        return row.num_cached - before

    def give_back(self, rows: Iterable[Row]) -> None:
        """Rows that hold KV and do not run give it back."""
        for row in rows:
            if self.runner is not None and row.num_cached:
                row.num_cached = 0
                self.runner.release([row.request_id])

    def publish(self, rows: Iterable[Row]) -> None:
        """Let other rows adopt the cached tokens of these."""
        if self.runner is None or (shared := self.runner.shared_kv) is None:
            return
        for row in rows:
            if row.num_cached >= shared.prefix_unit:
                shared.publish_prefix(row.request_id, row.tokens[: row.num_cached])

    def waits(self, rows: Seq[Row]) -> set[str]:
        """The rows, by request id, whose prefix an earlier row of this step is computing.

        They wait until it is committed, and adopt it then. The earliest never waits, so there is always progress.
        """
        waiting, coming = set[str](), set[tuple[int, ...]]()
        if self.runner is None or len(rows) < 2 or (shared := self.runner.shared_kv) is None:
            return waiting
        unit = shared.prefix_unit
        for row in rows:
            end = (row.num_cached // unit + 1) * unit
            if end <= len(row.tokens):
                text = tuple(row.tokens[:end])
                if text in coming and end < len(row.tokens):  # the last token's KV is not adopted
                    waiting.add(row.request_id)
                coming.add(text)
        return waiting
