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
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "demo_speedup.svg"
WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 84, 56
STEP = 0.5  # between the lines across
GREY = "#808590"  # of middle lightness, as all colours here, to be read on a light and on a dark page
BUSY = 0.1  # the share of the cores that other processes may use before the plot says so
COLOURS = ("#2f7fd6", "#d9782d", "#3a9a68", "#a866c4")

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
    """The SVG."""
    sizes = sorted({size for ratios in curves.values() for size in ratios})
    every = [ratio for ratios in curves.values() for values in ratios.values() for ratio in values]
    low, high = int(min(0.5, *every) / STEP) * STEP, -int(-max(1.5, *every) / STEP - 1) * STEP
    where = measured["provenance"]
    machine = where["hardware"]
    repeats = max(len(values) for ratios in curves.values() for values in ratios.values())
    parts = f"{machine['threads']} threads", measured["dtype"], f"{repeats} repeats", where["date"]
    speed = ", ".join(filter(None, parts))
    busy = max([run["other_cpu_share"] or 0 for run in measured["runs"]], default=0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="16">',
        f"<title>Speed-up over plain greedy decoding by batch size, {subject}</title>",
        f'<text x="{LEFT}" y="22" fill="{GREY}">× plain greedy decoding, by batch size: {subject}</text>',
        f'<text x="{LEFT}" y="42" fill="{GREY}" font-size="12">{machine["processor"]}, {speed}</text>',
    ]
    if busy > BUSY:
        said = f"not a quiet machine: other processes used up to {busy:.0%} of its cores"
        lines.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="{GREY}" font-size="12">{said}</text>')

    def across(place: int) -> int:
        return round(LEFT + 40 + place * (WIDTH - LEFT - RIGHT - 80) / max(len(sizes) - 1, 1))

    def up(ratio: float) -> float:
        return round(TOP + (high - ratio) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def curve(label: str, ratios: Ratios, colour: str, shift: int, key: int) -> Iterator[str]:
        yield f'<text x="{key}" y="68" fill="{colour}" font-weight="bold">{label}</text>'
        points = [(across(sizes.index(size)) + shift, ratios[size]) for size in sorted(ratios)]
        path = " ".join(f"{x},{up(median(values))}" for x, values in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>'
        for x, values in points:
            ends = f'y1="{up(min(values))}" y2="{up(max(values))}"'
            yield f'<line x1="{x}" x2="{x}" {ends} stroke="{colour}" stroke-width="2" opacity="0.6"/>'
            yield f'<circle cx="{x}" cy="{up(median(values))}" r="5" fill="{colour}"/>'

    for number in range(round((high - low) / STEP) + 1):
        ratio = low + number * STEP
        dashes = "" if ratio == 1 else ' stroke-dasharray="2 5"'
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(ratio)}" y2="{up(ratio)}" stroke="{GREY}"{dashes}/>',
            f'<text x="{LEFT - 8}" y="{up(ratio) + 5}" fill="{GREY}" text-anchor="end">{ratio}</text>',
        ]
    for place, size in enumerate(sizes):
        x = across(place)
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 28}" fill="{GREY}" text-anchor="middle">{size}</text>')
    key = LEFT
    for number, ((drafter, ratios), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        lines += curve(drafter, ratios, colour, 7 * (number - len(curves) // 2), key)
        key += 10 * len(drafter) + 40
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the plot; a JSON file of the same name stands beside it")
    parser.add_argument("--drafters", default="suffix,llma,draft_model", help="at most four, with commas between")
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
