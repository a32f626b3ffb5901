"""Other engines beside this one, from the results of ``benchmarks/cpu_peers.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from emssd.report.cells import Spread
from emssd.report.figures import Curve, colour, curves
from emssd.report.rows import machine_name
from emssd.report.sections.common import Plot, Section
from emssd.report.sources import Material, PeersRun
from emssd.report.text import code, escape, listed

__all__ = ["peers"]

_Runs = Seq[PeersRun]  # of one setting, each with batch sizes of its own
_CUT = ("batch_sizes", "num_prompts")  # options in which the parts of a run differ that was cut by batch size


def peers(material: Material) -> Section | None:
    """Tokens/s and exact matches of all engines, those of one run together."""
    if not material.peers:
        return None
    section = Section("peers", "Beside other engines")
    section.say(
        "The paper compares with no other engine. Here every engine ran in a process of its own, in turn with the "
        "others of its run, on the same prompts; tokens/s include the prompts. Speeds of different runs are not "
        "compared; one that was cut by batch size is shown as one."
    )
    section.say(
        "*emssd ÷ it* is a ratio of medians of one run. *= own greedy*: rows whose tokens are those of the engine's "
        "own greedy decoding at the same batch size, of all rows; the other columns likewise, with the outputs that "
        "they name."
    )
    for index, runs in enumerate(_joined(material.peers)):
        _of_runs(section, index, runs)
    return section


def _joined(runs: Iterable[PeersRun]) -> list[list[PeersRun]]:
    """Runs that are parts of one, cut by batch size: of one setting, and with no batch size in common."""
    found: list[list[PeersRun]] = []
    for run in runs:
        for parts in found:
            sizes = {size for part in parts for size in _sizes(part)}
            if _setting(run) == _setting(parts[0]) and sizes.isdisjoint(_sizes(run)):
                parts.append(run)
                break
        else:
            found.append([run])
    return found


def _setting(run: PeersRun) -> Mapping[str, Any]:
    options = {name: value for name, value in run.run["options"].items() if name not in _CUT}
    return {**run.run, "options": options, "date": None}


def _sizes(run: PeersRun) -> list[int]:
    return sorted({cell["batch_size"] for cell in run.cells})


def _of_runs(section: Section, index: int, runs: _Runs) -> None:
    names = list(dict.fromkeys(cell["peer"] for run in runs for cell in run.cells))
    others = [name for name in names if name != "emssd"]
    title = f"emssd beside {listed(others)}" if "emssd" in names and others else listed(names)
    section.head(escape(title))
    section.say(_origin(runs))
    _table(section, runs)
    modes = list(dict.fromkeys(cell["mode"] for run in runs for cell in _measured(run)))
    if modes:
        shown = [
            Plot(f"peers_{index}_{mode}", f"Tokens/s by batch size, {mode}: {title}", _chart(runs, mode, names, title))
            for mode in modes
        ]
        section.plots(shown, "Medians, bars from the least to the greatest repeat.")
    section.points(_judge(runs, mode) for mode in modes)


def _origin(runs: _Runs) -> str:
    run = runs[0].run
    options = run["options"]
    versions = listed(
        f"{name} ({', '.join(f'{package} {version}' for package, version in each.items())})"
        for name, each in run["versions"].items()
    )
    hardware = {
        "processor": run["processor"],
        "threads": options.get("threads", "?"),
        "device": run.get("device", "cpu"),
    }
    told = {name: options[name] for name in ("prompts", "max_new_tokens", "dtype", "repeats") if name in options}
    told |= {"data": run["data"]} if "data" in run else {}
    settings = ", ".join(f"{name} {value}" for name, value in (told | run.get("speculation", {})).items())
    given = f", emssd with {', '.join(options['emssd'])}" if options.get("emssd") else ""
    said = (
        f"{run['script']}, commit {run['commit']}, {listed(dict.fromkeys(each.run['date'] for each in runs))}, on "
        f"{machine_name(hardware)}: target {run['models']['target']}, draft {run['models'].get('draft')}, {settings}"
        f"{given}; {versions}; rows of"
    )
    return f"{escape(said)} {listed(map(_file, runs))}."


def _file(run: PeersRun) -> str:
    return f"{code(run.name)} (batch size {listed(_sizes(run))}, {run.run['options'].get('num_prompts', '?')} prompts)"


def _table(section: Section, runs: _Runs) -> None:
    columns = list(dict.fromkeys(name for run in runs for cell in run.cells for name in cell.get("equal_rows", {})))
    lines = []
    for run in runs:
        measured = [cell for cell in _measured(run) if cell["peer"] == "emssd"]
        ours = {(cell["mode"], cell["batch_size"]): _spread(cell).median for cell in measured}
        lines += [_line(cell, ours, columns) for cell in run.cells]
    lines.sort(key=lambda line: (int(line[0]), line[1] != "greedy", line[1]))
    equal = [f"= {name}" for name in ("own greedy", *columns)]
    section.table(["batch", "mode", "engine", "tokens/s (min–max)", "emssd ÷ it", *equal], lines, left=3)


def _line(cell: Mapping[str, Any], ours: Mapping[tuple[str, int], float], columns: list[str]) -> list[str]:
    start = [str(cell["batch_size"]), escape(cell["mode"]), escape(cell["peer"])]
    if "failed" in cell:
        return [*start, "failed: " + escape(cell["failed"].splitlines()[0]), *[""] * (2 + len(columns))]
    spread, total = _spread(cell), cell.get("num_rows", "?")
    base, own = ours.get((cell["mode"], cell["batch_size"])), cell.get("equal_to_own_greedy")
    ratio = f"{base / spread.median:.2f}" if base and cell["peer"] != "emssd" else ""
    equal = [f"{cell['equal_rows'][name]}/{total}" if name in cell["equal_rows"] else "" for name in columns]
    return [*start, spread.text(",.0f"), ratio, "" if own is None else f"{own}/{total}", *equal]


def _chart(runs: _Runs, mode: str, names: Seq[str], title: str) -> str:
    """A curve for each engine, in the colour that it has in all modes."""
    cells = [cell for run in runs for cell in _measured(run) if cell["mode"] == mode]
    lines = []
    for index, name in enumerate(names):
        found = {float(cell["batch_size"]): _spread(cell) for cell in cells if cell["peer"] == name}
        ranges = {batch: (spread.low, spread.high) for batch, spread in found.items()}
        medians = {batch: spread.median for batch, spread in found.items()}
        lines += [Curve(name, medians, colour(None, index), ranges=ranges)] if found else []
    return curves(f"{mode}: {title}", "batch size / rows", "tokens/s, prompts included", lines)


def _judge(runs: _Runs, mode: str) -> str:
    """Where this project is ahead in all repeats, behind, or neither."""
    cells = {
        (cell["peer"], cell["batch_size"]): _spread(cell)
        for run in runs
        for cell in _measured(run)
        if cell["mode"] == mode
    }
    said = []
    for (peer, size), theirs in sorted(cells.items()):
        ours = cells.get(("emssd", size))
        if peer != "emssd" and ours is not None:
            apart = "ahead" if ours.low > theirs.high else "behind" if ours.high < theirs.low else "within the spread"
            said.append(f"{peer} at {size}: {ours.median / theirs.median:.2f} ({apart})")
    return escape(f"{mode}: emssd ÷ {'; '.join(said)}.") if said else escape(f"{mode}: no other engine.")


def _measured(run: PeersRun) -> list[dict[str, Any]]:
    return [cell for cell in run.cells if "failed" not in cell]


def _spread(cell: Mapping[str, Any]) -> Spread:
    return Spread.of(cell["tokens_per_second"])
