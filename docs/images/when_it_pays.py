"""Draws docs/images/when_it_pays.svg from docs/results/cpu_peers*.json: speed-ups over plain greedy decoding.

``python docs/images/when_it_pays.py`` writes it. Its greys and colours are of middle lightness, to be
read on a light and on a dark page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

IMAGES = Path(__file__).resolve().parent
RESULTS = IMAGES.parent / "results"
FILES = ("cpu_peers_batch1.json", "cpu_peers.json")
MODES = {"ngram": ("drafter=llma", "#2f7fd6"), "draft_model": ("drafter=draft_model", "#d9782d")}
WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 56, 56
LOW, HIGH = 0.5, 2.0
GREY = "#808590"


def speedups(mode: str) -> dict[int, list[float]]:
    """By batch size, for each repeat the ratio of `mode` to the greedy run of the same repeat."""
    speeds: dict[tuple[str, int], list[float]] = {}
    for name in FILES:
        for cell in json.loads((RESULTS / name).read_text())["cells"]:
            if cell["peer"] == "emssd":
                speeds[cell["mode"], cell["batch_size"]] = cell["tokens_per_second"]
    return {
        batch_size: [own / greedy for own, greedy in zip(values, speeds["greedy", batch_size], strict=True)]
        for (name, batch_size), values in sorted(speeds.items())
        if name == mode
    }


def picture() -> str:
    """The SVG."""
    sizes = list(speedups("ngram"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="16">',
        "<title>Speed-up over plain greedy decoding by batch size, emssd on two cores of a CPU</title>",
        f'<text x="{LEFT}" y="24" fill="{GREY}">× plain greedy decoding, by batch size</text>',
    ]
    for ratio in (0.5, 1.0, 1.5, 2.0):
        dashes = "" if ratio == 1 else ' stroke-dasharray="2 5"'
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(ratio)}" y2="{_y(ratio)}" stroke="{GREY}"{dashes}/>',
            f'<text x="{LEFT - 8}" y="{_y(ratio) + 5}" fill="{GREY}" text-anchor="end">{ratio}</text>',
        ]
    for place, size in enumerate(sizes):
        x = _x(place, len(sizes))
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 28}" fill="{GREY}" text-anchor="middle">{size}</text>')
    for shift, (mode, (label, colour)) in zip((-3, 3), MODES.items(), strict=True):
        lines += _curve(speedups(mode), label, colour, shift)
    return "\n".join([*lines, "</svg>", ""])


def _curve(ratios: dict[int, list[float]], label: str, colour: str, shift: int) -> Iterator[str]:
    points = [(_x(place, len(ratios)) + shift, values) for place, values in enumerate(ratios.values())]
    path = " ".join(f"{x},{_y(median(values))}" for x, values in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>'
    for x, values in points:
        yield f'<line x1="{x}" x2="{x}" y1="{_y(min(values))}" y2="{_y(max(values))}" stroke="{colour}" opacity="0.6"/>'
        yield f'<circle cx="{x}" cy="{_y(median(values))}" r="5" fill="{colour}"/>'
    x, values = points[1]
    place = _y(max(values)) - 12 if shift < 0 else _y(min(values)) + 24
    yield f'<text x="{x}" y="{place}" fill="{colour}" font-weight="bold">{label}</text>'


def _x(place: int, count: int) -> int:
    return round(LEFT + 40 + place * (WIDTH - LEFT - RIGHT - 80) / (count - 1))


def _y(ratio: float) -> float:
    return round(TOP + (HIGH - ratio) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM), 1)


if __name__ == "__main__":
    (IMAGES / "when_it_pays.svg").write_text(picture(), encoding="utf-8")
