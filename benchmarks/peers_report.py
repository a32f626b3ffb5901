"""The page of ``python -m emssd_lab.report`` with one section more: other engines, from ``benchmarks/cpu_peers.py``.

Use it as ``python benchmarks/peers_report.py RUNS --peers FILE --out DIR --title TEXT``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from emssd_lab.report.__main__ import make_parser
from emssd_lab.report.cells import Spread
from emssd_lab.report.figures import Curve, colour, curves
from emssd_lab.report.page import report
from emssd_lab.report.rows import Hardware, read
from emssd_lab.report.sections import Section, sections
from emssd_lab.report.tables import Table, code, escape, listed, pairs

from emssd.errors import ConfigError, exit_on_error

__all__ = ["main", "peers", "read_peers"]


class PeersRun(NamedTuple):
    """A comparison with other engines.

    Attributes:
        name: its file.
        run: what ran, on what.
        cells: one for each engine, mode and batch size.
    """

    name: str
    run: Mapping[str, Any]
    cells: list[dict[str, Any]]


_Runs = Seq[PeersRun]  # of one setting, each with batch sizes of its own
_Cell = Mapping[str, Any]
_FAILED = ("batch_size", "mode", "peer")
_CELL = (*_FAILED, "tokens_per_second", "equal_rows")
_RUN = ("script", "commit", "date", "processor", "models", "options", "versions")
_TOLD = ("prompts", "max_new_tokens", "dtype", "repeats")
_CUT = ("batch_sizes", "num_prompts")  # options in which the parts of a run differ that was cut by batch size


def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and make the report."""
    with exit_on_error("peers_report.py"):
        parser = make_parser()
        parser.prog = "python benchmarks/peers_report.py"
        parser.add_argument(
            "--peers", nargs="+", type=Path, required=True, metavar="FILE", help="results of benchmarks/cpu_peers.py"
        )
        options = parser.parse_args(arguments)
        compared = read_peers(options.peers)
        found = sections(read(options.runs))
        place = next(index for index, section in enumerate(found) if section.name in ("runs", "provenance"))
        found.insert(place, peers(compared))
        for each in compared:
            found[-1].say(f"{code(each.name)}: see its section.")
        for file in report(found, options.out, title=options.title, name=options.name)[:2]:
            print(file)


def read_peers(paths: Iterable[Path]) -> list[PeersRun]:
    """The comparisons in these files.

    Raises:
        ConfigError: a file cannot be read, or is of another format.
    """
    found = []
    for path in paths:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(value, dict) or not {"run", "cells"} <= value.keys():
            raise ConfigError(f"{path} is no result of benchmarks/cpu_peers.py")
        for cell in value["cells"]:
            _need(cell, _FAILED if "failed" in cell else _CELL, f"{path}: a cell")
        _need(value["run"], _RUN, f"{path}: its run")
        found.append(PeersRun(str(path), value["run"], value["cells"]))
    return found


def _need(value: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in value:
            raise ConfigError(f"{what} has no {name!r}; run benchmarks/cpu_peers.py again")


def peers(compared: Iterable[PeersRun]) -> Section:
    """Tokens/s and exact matches of all engines, those of one run together."""
    section = Section("peers", "Beside other engines")
    section.say(
        "Every engine ran in a process of its own, in turn with the others, on the same prompts; tokens/s include the "
        "prompts. *= own greedy* counts rows whose tokens are those of the engine's own greedy decoding at that batch "
        "size; the other columns count likewise, with the outputs that they name."
    )
    for runs in _joined(compared):
        _of_runs(section, runs)
    return section


def _joined(runs: Iterable[PeersRun]) -> list[list[PeersRun]]:
    """Runs that are parts of one, cut by batch size: of one setting, and with no batch size in common."""
    found: list[list[PeersRun]] = []
    for run in runs:
        alike = (parts for parts in found if _setting(parts[0]) == _setting(run))
        home = next((parts for parts in alike if not set(_sizes(*parts)) & set(_sizes(run))), None)
        if home is None:
            found.append([run])
        else:
            home.append(run)
    return found


def _setting(run: PeersRun) -> Mapping[str, Any]:
    options = {name: value for name, value in run.run["options"].items() if name not in _CUT}
    return {**run.run, "options": options, "date": None}


def _sizes(*runs: PeersRun) -> list[int]:
    return sorted({cell["batch_size"] for run in runs for cell in run.cells})


def _of_runs(section: Section, runs: _Runs) -> None:
    names = list(dict.fromkeys(cell["peer"] for run in runs for cell in run.cells))
    others = [name for name in names if name != "emssd"]
    title = f"emssd beside {listed(others)}" if "emssd" in names and others else listed(names)
    section.say(f"### {escape(title)}")
    section.say(_origin(runs))
    place = itemgetter("peer", "mode", "batch_size")
    cells = sorted((cell for run in runs for cell in run.cells), key=_rank)
    speeds = {place(cell): Spread.of(cell["tokens_per_second"]) for cell in cells if "failed" not in cell}

    outputs = dict.fromkeys(["own greedy", *(name for cell in cells for name in cell.get("equal_rows", {}))])

    def line(cell: _Cell) -> dict[str, str | None]:
        mine = speeds.get(place(cell))
        speed = mine.text(",.0f") if mine else "failed: " + cell["failed"].splitlines()[0]
        ours = speeds.get(("emssd", *place(cell)[1:])) if cell["peer"] != "emssd" else None
        equal = {"own greedy": cell.get("equal_to_own_greedy")} | cell.get("equal_rows", {})
        return {
            "batch": str(cell["batch_size"]),
            "mode": str(cell["mode"]),
            "engine": str(cell["peer"]),
            "tokens/s (min–max)": speed,
            "emssd ÷ it": f"{ours.median / mine.median:.2f}" if ours and mine else None,
        } | {
            f"= {name}": None if equal.get(name) is None else f"{equal[name]}/{cell.get('num_rows', '?')}"
            for name in outputs
        }  # fmt: skip

    section.table(Table.of(map(line, cells), left=3))
    for mode in dict.fromkeys(mode for _, mode, _ in speeds):
        lines = []
        for index, name in enumerate(names):  # a colour for each engine, the same in all modes
            points = {float(size): spread for (*cell, size), spread in speeds.items() if cell == [name, mode]}
            lines.append(Curve(name, points, colour(None, index)))
        svg = curves(f"{mode}: {title}", "batch size / rows", "tokens/s, prompts included", lines)
        section.draw(f"Tokens/s by batch size, {mode}: {title}", svg)


def _rank(cell: _Cell) -> tuple[int, bool, str]:
    return cell["batch_size"], cell["mode"] != "greedy", cell["mode"]


def _origin(runs: _Runs) -> str:
    """The program, its options and its machine; the files of one run differ in date, batch sizes and prompts."""
    run, options = runs[0].run, runs[0].run["options"]
    machine = Hardware(run["processor"], options.get("threads", "?"), "cpu").name
    dates = listed(dict.fromkeys(each.run["date"] for each in runs))
    told = run["models"] | {name: options[name] for name in _TOLD if name in options} | run.get("speculation", {})
    told |= {"data": run["data"]} if "data" in run else {}
    given = f", emssd with {', '.join(options['emssd'])}" if options.get("emssd") else ""
    versions = listed(f"{name} ({pairs(each)})" for name, each in run["versions"].items())
    said = f"{run['script']}, commit {run['commit']}, {dates}, on {machine}: {pairs(told)}{given}; {versions}; rows of"
    files = (
        f"{code(each.name)} (batch size {listed(_sizes(each))}, {each.run['options'].get('num_prompts', '?')} prompts)"
        for each in runs
    )
    return f"{escape(said)} {listed(files)}."


if __name__ == "__main__":
    main()
