"""Draws what `compare.py` has measured at several batch sizes: speed-ups of its cells, in the look of reports.

python benchmarks/demo_plot.py 1.json 8.json --cells suffix,self --out plot.svg --subject 'a Llama of 468M'
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import median

from emssd_lab.report.cells import Spread
from emssd_lab.report.figures import coloured, speed_chart

CELLS = "suffix,llma,draft_model"

Ratios = dict[int, list[float]]


def speedups(files: Seq[Path], cells: str) -> dict[str, Ratios]:
    """Of each cell by batch size, the ratios to *plain* in all repeats."""
    curves = {cell: Ratios() for cell in cells.split(",")}
    for row in [row for file in files for row in json.loads(file.read_text())["rows"]]:
        size = int(dict(option.split("=", 1) for option in row["options"])["batch_size"])
        for cell, ratios in curves.items():
            ratios[size] = row["cells"][cell]["ratios"]
    return curves


def picture(files: Seq[Path], cells: str, subject: str) -> str:
    """The SVG."""
    curves, made = speedups(files, cells), json.loads(files[0].read_text())["provenance"]
    repeats = max(len(ratios) for curve in curves.values() for ratios in curve.values())
    machine = f"{made['hardware']['processor']}, {made['hardware']['threads']} threads"
    spreads = {cell: {size: Spread.of(curve[size]) for size in curve} for cell, curve in curves.items()}
    return speed_chart(f"{subject}: {machine}, {repeats} repeats, {made['date']}", coloured(spreads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what compare.py wrote")
    parser.add_argument("--cells", default=CELLS, help="with commas between")
    parser.add_argument("--out", type=Path, required=True, help="the plot")
    parser.add_argument("--subject", default="the embedded demo, float32", help="what was decoded, for the title")
    options = parser.parse_args()
    options.out.write_text(picture(options.files, options.cells, options.subject), encoding="utf-8")
    for cell, curve in speedups(options.files, options.cells).items():
        for size, ratios in sorted(curve.items()):
            print(f"{cell}, batch {size}: {median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})")


if __name__ == "__main__":
    main()
