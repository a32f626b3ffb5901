"""The slots of a rectangular KV slab by token, as integers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SlabTable"]


class SlabTable:
    """The slots of a slab with one row per sequence, in order of arrival, without gaps between rows.

    Args:
        pad_kv: write all rows at the same slot: the one after the last slot that any row uses.
    """

    def __init__(self, pad_kv: bool) -> None:
        self._pad_kv = pad_kv
        self._slots: dict[str, list[int]] = {}

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        """Slots per row in use: one after the last used slot of any row."""
        return max((slots[-1] + 1 for slots in self._slots.values() if slots), default=0)

    @property
    def num_holes(self) -> int:
        """Slots in use, over all rows, that hold no token."""
        num_slots = self.num_slots
        return sum(num_slots - len(slots) for slots in self._slots.values())

    def rows(self, request_ids: Iterable[str]) -> list[int]:
        """The rows of sequences; a new sequence gets the next row."""
        for request_id in request_ids:
            self._slots.setdefault(request_id, [])
        places = {request_id: row for row, request_id in enumerate(self._slots)}
        return [places[request_id] for request_id in request_ids]

    def slots(self, request_id: str) -> list[int]:
        """Slots of a sequence's tokens, in token order."""
        return self._slots[request_id]

    def write_start(self, request_id: str) -> int:
        """Slot of the next token: with padded KV after the batch's last slot, else after the row's own last slot."""
        if self._pad_kv:
            return self.num_slots
        slots = self._slots[request_id]
        return slots[-1] + 1 if slots else 0

    def append(self, request_id: str, slots: range) -> None:
        """The sequence's next tokens lie at `slots`."""
        self._slots[request_id].extend(slots)

    def truncate(self, request_id: str, num_tokens: int) -> list[int]:
        """Keep the first `num_tokens` tokens. Returns the slots that were given up."""
        slots = self._slots[request_id]
        dropped = slots[num_tokens:]
        del slots[num_tokens:]
        return dropped

    def release(self, request_ids: Iterable[str]) -> list[int]:
        """Forget sequences. Returns the former rows of those that stay; they close ranks in this order."""
        gone = set(request_ids)
        stay = [row for row, request_id in enumerate(self._slots) if request_id not in gone]
        self._slots = {request_id: slots for request_id, slots in self._slots.items() if request_id not in gone}
        return stay
