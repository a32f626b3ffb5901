"""Other engines beside this one, from the results of ``benchmarks/cpu_peers.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emssd.report.cells import Spread
from emssd.report.figures import Curve, colour, curves
from emssd.report.sections.common import Plot, Section
from emssd.report.sources import Material, PeersRun
from emssd.report.text import code, escape, listed

__all__ = ["peers"]

_Key = tuple[str, str, int]  # peer, mode, batch size


def peers(material: Material) -> Section | None:
    """Tokens/s and exact matches of all engines."""
    if not material.peers:
        return None
    section = Section("peers", "Beside other engines")
    section.say(
        "The paper compares with no other engine. Here every engine ran in a process of its own, in turn with the "
        "others, on the same prompts; tokens/s include the prompts."
    )
    for each in material.peers:
        section.say(_origin(each))
    columns = list(
        dict.fromkeys(name for run in material.peers for cell in run.cells for name in cell.get("equal_rows", {}))
    )
    lines = []
    for run in material.peers:
        ours = {
            (cell["mode"], cell["batch_size"]): _spread(cell).median
            for cell in _measured(run)
            if cell["peer"] == "emssd"
        }
        lines += [_line(cell, ours, columns) for cell in run.cells]
    lines.sort(key=lambda line: (int(line[0]), line[1] != "greedy", line[1]))
    section.table(
        [
            "batch",
            "mode",
            "engine",
            "tokens/s (min–max)",
            "emssd ÷ it",
            "= own greedy",
            *(f"= {name}" for name in columns),
        ],
        lines,
        left=3,
    )
    section.say(
        "*= own greedy*: rows whose tokens are those of the engine's own greedy decoding at the same batch size, of "
        "all rows; the other columns likewise, with the outputs that they name. emssd ÷ it is a ratio of medians of "
        "one run."
    )
    modes = dict.fromkeys(cell["mode"] for run in material.peers for cell in _measured(run))
    shown = [Plot(f"peers_{mode}", f"Tokens/s by batch size, {mode}", _chart(material, mode)) for mode in modes]
    section.plots(shown, "Medians, bars from the least to the greatest repeat.")
    section.points(_judge(material, mode) for mode in modes)
    return section


def _origin(peers_run: PeersRun) -> str:
    run = peers_run.run
    options = run["options"]
    versions = listed(
        f"{name} ({', '.join(f'{package} {version}' for package, version in each.items())})"
        for name, each in run["versions"].items()
    )
    machine = f"{run['processor']}, {options.get('threads', '?')} threads"
    settings = ", ".join(
        f"{k} {v}" for k, v in options.items() if k in ("num_prompts", "max_new_tokens", "dtype", "repeats")
    )
    return escape_outside_code(
        f"{run['script']}, commit {run['commit']}, {run['date']}, on {machine}: target {run['models']['target']}, "
        f"draft {run['models'].get('draft')}, {settings}; {versions}; rows of ",
        peers_run.name,
    )


def escape_outside_code(text: str, name: str) -> str:
    """`text` as it is, followed by `name` as code."""
    return escape(text) + " " + code(name) + "."


def _line(cell: Mapping[str, Any], ours: Mapping[tuple[str, int], float], columns: list[str]) -> list[str]:
    start = [str(cell["batch_size"]), escape(cell["mode"]), escape(cell["peer"])]
    if "failed" in cell:
        return [*start, "failed: " + escape(cell["failed"].splitlines()[0]), *[""] * (2 + len(columns))]
    spread, total = _spread(cell), cell.get("num_rows", "?")
    base, own = ours.get((cell["mode"], cell["batch_size"])), cell.get("equal_to_own_greedy")
    ratio = f"{base / spread.median:.2f}" if base and cell["peer"] != "emssd" else ""
    equal = [f"{cell['equal_rows'][name]}/{total}" if name in cell["equal_rows"] else "" for name in columns]
    return [*start, spread.text(",.0f"), ratio, "" if own is None else f"{own}/{total}", *equal]


def _chart(material: Material, mode: str) -> str:
    by_peer: dict[str, dict[float, Spread]] = {}
    for run in material.peers:
        for cell in _measured(run):
            if cell["mode"] == mode:
                by_peer.setdefault(cell["peer"], {})[float(cell["batch_size"])] = _spread(cell)
    lines = []
    for index, (peer, found) in enumerate(by_peer.items()):
        ranges = {batch: (spread.low, spread.high) for batch, spread in found.items()}
        medians = {batch: spread.median for batch, spread in found.items()}
        lines.append(Curve(peer, medians, colour(None, index), ranges=ranges))
    return curves(mode, "batch size / rows", "tokens/s, prompts included", lines)


def _judge(material: Material, mode: str) -> str:
    """Where this project is ahead in all repeats, behind, or neither."""
    said = []
    for run in material.peers:
        cells: dict[_Key, Spread] = {(c["peer"], c["mode"], c["batch_size"]): _spread(c) for c in _measured(run)}
        for (peer, which, size), theirs in sorted(cells.items(), key=lambda item: (item[0][0], item[0][2])):
            ours = cells.get(("emssd", mode, size))
            if peer != "emssd" and which == mode and ours is not None:
                apart = (
                    "ahead" if ours.low > theirs.high else "behind" if ours.high < theirs.low else "within the spread"
                )
                said.append(f"{peer} at {size}: {ours.median / theirs.median:.2f} ({apart})")
    return escape(f"{mode}: emssd ÷ {'; '.join(said)}.") if said else escape(f"{mode}: no other engine.")


def _measured(run: PeersRun) -> list[dict[str, Any]]:
    return [cell for cell in run.cells if "failed" not in cell]


def _spread(cell: Mapping[str, Any]) -> Spread:
    return Spread.of(cell["tokens_per_second"])
