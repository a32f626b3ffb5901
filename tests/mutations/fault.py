"""`Fault`: a mistake to plant into one file, as plain data; `FAULTS`, and their table for the decision note."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A mistake.

    Attributes:
        name: what goes wrong, in a few words; unique.
        room: the part of the project that it is planted in.
        file: where, from the root of the project; a pattern, of whose files one has the text.
        old, new: the text that is there exactly once, and the one that takes its place.
        caught_by: tests that must fail, at least one of them; pytest's names, without parameters for all of a function.
        needs: the feature of the processor that the text is compiled for, as in ``/proc/cpuinfo``; "" for none.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    needs: str = ""

    def place(self, root: Path = ROOT) -> Path:
        """The file that holds the old text, once.

        Raises:
            LookupError: there is no such text, or it is there more than once.
        """
        paths = [path for path in sorted(root.glob(self.file)) for _ in range(path.read_text().count(self.old))]
        if len(paths) != 1:
            raise LookupError(f"{self.name!r}: its old text is in {self.file} {len(paths)} times, and should be once")
        return paths[0]


def read(path: Path) -> Iterator[Fault]:
    """The faults of a text file, with an empty line between them.

    A fault begins with its name, and ``| ROOM | FILE`` or ``| ROOM | FILE | FEATURE``. Lines after ``-`` are the old
    text, those after ``+`` the new one, and ``= TEST`` names a test. A text ends with a line break if its last line is
    empty.
    """
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        name, place, *lines = block.split("\n")
        _, room, file, *needs = (part.strip() for part in place.split("|"))
        marked = {mark: [line[1:] for line in lines if line[0] == mark] for mark in "-+="}
        assert sum(map(len, marked.values())) == len(lines), f"{path.name}: {name!r} has a line of another kind"
        old, new = "\n".join(marked["-"]), "\n".join(marked["+"])
        yield Fault(name, room, file, old, new, tuple(line.strip() for line in marked["="]), *needs)


FAULTS = tuple(fault for path in sorted(Path(__file__).parent.glob("faults/*.txt")) for fault in read(path))


def function_of(test: str) -> str:
    """The name of a test without its parameters."""
    return test.partition("[")[0]


def as_markdown() -> str:
    """The table of faults, by room."""
    lines = ["| Room | Fault | Caught by |", "| --- | --- | --- |"]
    for fault in sorted(FAULTS, key=lambda fault: fault.room):
        caught_by = ", ".join(f"`{function_of(test).rpartition('/')[2]}`" for test in fault.caught_by)
        lines.append(f"| {fault.room} | {fault.name} | {caught_by} |")
    return "\n".join(lines)
