"""Measures and draws what drafters gain on the embedded demo, by batch size: the plot of the README.

    python benchmarks/demo_plot.py      # some ten minutes on two cores that do nothing else; needs no network
    python benchmarks/demo_plot.py --compared 1.json 8.json --drafters suffix,self --out plot.svg     # of `compare.py`

It measures nothing itself: it runs a sweep of ``python -m emssd``, whose repeats alternate between all drafters and
batch sizes, and keeps the figures of each run in a JSON file beside the plot. With ``--compared``, it draws what
`compare.py` has measured; drafters are names of cells then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from emssd_lab.report.cells import Spread
from emssd_lab.report.figures import coloured, speed_chart

from emssd.metrics.busy import BUSY_SHARE

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "demo_speedup.svg"

Ratios = dict[int, list[float]]


def measure(drafters: str, batch_sizes: str, repeats: int, more: list[str]) -> dict[str, Any]:
    """Run the sweep. Returns what is kept of it: the figures of each run, and where they come from."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = [
            "experiment=drafters",
            "task=demo",
            "budget=adaptive",
            "max_new_tokens=128",
            "repeat=" + ",".join(map(str, range(1, repeats + 1))),
            f"batch_size={batch_sizes}",
            f"drafter=none,{drafters}",
            *more,
        ]
        command = [sys.executable, "-m", "emssd", "-m", *sweep]
        subprocess.run([*command, f"output_dir={folder}/rows"], check=True)
        rows = [json.loads(line) for line in (Path(folder) / "rows" / "rows.jsonl").read_text().splitlines()]
    runs = [
        {name: row[name] for name in ("repeat", "batch_size", "drafter")}
        | {name: row["metrics"][name] for name in ("tokens_per_second", "mean_acceptance_length", "other_cpu_share")}
        for row in rows
    ]
    provenance = rows[0]["provenance"] | {"command": " ".join(["python -m emssd -m", *sweep])}
    return {"runs": runs, "dtype": rows[0]["dtype"], "provenance": provenance}


def speedups(measured: dict[str, Any]) -> dict[str, Ratios]:
    """Tokens/s ÷ those of plain greedy decoding in the same repeat, by drafter and batch size, for each repeat."""
    speeds = {(run["drafter"], run["batch_size"], run["repeat"]): run["tokens_per_second"] for run in measured["runs"]}
    found: dict[str, Ratios] = {}
    for (drafter, batch_size, repeat), speed in speeds.items():
        if drafter != "none":
            ratios = found.setdefault(drafter, {}).setdefault(batch_size, [])
            ratios.append(speed / speeds["none", batch_size, repeat])
    return found


def compared(files: list[Path], cells: str) -> tuple[dict[str, Ratios], dict[str, Any]]:
    """The speed-ups of `cells`, by batch size, and where they come from: of files that `compare.py` wrote."""
    written, found = [json.loads(file.read_text()) for file in files], {cell: Ratios() for cell in cells.split(",")}
    for row in [row for each in written for row in each["rows"]]:
        size = int(dict(option.split("=", 1) for option in row["options"])["batch_size"])
        for cell, ratios in found.items():
            ratios[size] = row["cells"][cell]["ratios"]
    return found, {"runs": [], "dtype": "", "provenance": written[0]["provenance"]}


def picture(curves: dict[str, Ratios], measured: dict[str, Any], subject: str) -> str:
    """The SVG, in the look of reports."""
    where = measured["provenance"]
    machine = where["hardware"]
    repeats = max(len(values) for ratios in curves.values() for values in ratios.values())
    parts = (
        machine["processor"],
        f"{machine['threads']} threads",
        measured["dtype"],
        f"{repeats} repeats",
        where["date"],
    )
    busy = max([run["other_cpu_share"] or 0 for run in measured["runs"]], default=0)
    said = f"not a quiet machine: other processes used up to {busy:.0%} of its cores" if busy > BUSY_SHARE else ""
    spreads = {name: {size: Spread.of(ratios[size]) for size in ratios} for name, ratios in curves.items()}
    return speed_chart(f"{subject}: {', '.join(filter(None, (*parts, said)))}", coloured(spreads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the plot; a JSON file of the same name stands beside it")
    parser.add_argument("--drafters", default="suffix,llma,draft_model", help="with commas between")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compared", type=Path, nargs="+", metavar="FILE", help="what compare.py wrote; nothing runs")
    parser.add_argument("--subject", default="the embedded demo", help="what was decoded, for the title")
    parser.add_argument("more", nargs="*", help="options of `python -m emssd`, for a plot of something else")
    given = parser.parse_args()
    if given.compared:
        curves, measured = compared(given.compared, given.drafters)
    else:
        measured = measure(given.drafters, given.batch_sizes, given.repeats, given.more)
        given.out.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
        curves = speedups(measured)
    given.out.write_text(picture(curves, measured, given.subject), encoding="utf-8")
    for drafter, by_size in curves.items():
        for size, values in sorted(by_size.items()):
            print(f"{drafter}, batch {size}: {median(values):.2f}× ({min(values):.2f}–{max(values):.2f})")
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
