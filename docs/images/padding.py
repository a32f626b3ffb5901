"""Draws docs/images/padding.svg: one step of two rows, padded and not, as docs/explanation/padding.md tells it.

``python docs/images/padding.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, HEIGHT, SIZE = 640, 400, 32
GREY, BLUE, ORANGE = "#808590", "#2f7fd6", "#d9782d"
CELLS = {  # how a token is drawn: fill, outline, further attributes
    "old": (GREY, GREY, ' fill-opacity="0.35"'),
    "newest": (BLUE, BLUE, ' fill-opacity="0.9"'),
    "draft": (BLUE, BLUE, ' fill-opacity="0.4"'),
    "padding": ("none", ORANGE, ' stroke-dasharray="4 3"'),
}
NEW_A, NEW_B = ["newest", "draft", "draft", "draft"], ["newest"]
KEPT_A, KEPT_B = ["old"] * 4 + ["newest", "draft", "draft"], ["old"] * 4 + ["newest"]  # two of three drafts accepted
PADDED = {
    "fed to the model": [NEW_A, NEW_B + ["padding"] * 3],
    "KV cache afterwards": [KEPT_A, KEPT_B + ["padding"] * 2],
}
UNPADDED = {"fed to the model": [NEW_A + NEW_B], "KV cache afterwards": [KEPT_A, KEPT_B]}


def picture() -> str:
    """The SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="16">',
        "<title>One step of two rows, padded and not</title>",
        *_method("padded: 8 tokens are fed, 3 for nothing; 2 slots of the cache are lost", PADDED, 0),
        *_method("not padded: 5 tokens, no slot lost", UNPADDED, 165),
    ]
    x, names = 20, {"old": "cached", "newest": "newest token", "draft": "draft", "padding": "padding"}
    for kind, name in names.items():
        lines += [_cell(x, HEIGHT - 42, kind), _text(x + SIZE + 8, HEIGHT - 20, name)]
        x += SIZE + 40 + 9 * len(name)
    return "\n".join([*lines, "</svg>", ""])


def _method(title: str, parts: dict[str, list[list[str]]], top: int) -> Iterator[str]:
    yield _text(20, top + 28, title, ' font-weight="bold"')
    for left, (what, rows) in zip((20, 290), parts.items(), strict=True):
        yield _text(left, top + 58, what)
        for number, row in enumerate(rows):
            yield from _row(left, top + 70 + number * (SIZE + 8), row)


def _row(left: int, top: int, kinds: Sequence[str]) -> Iterator[str]:
    for place, kind in enumerate(kinds):
        yield _cell(left + place * (SIZE + 4), top, kind)


def _cell(x: int, y: int, kind: str) -> str:
    fill, outline, more = CELLS[kind]
    colours = f'fill="{fill}" stroke="{outline}" stroke-width="2"{more}'
    return f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="4" {colours}/>'


def _text(x: int, y: int, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{GREY}"{more}>{words}</text>'


if __name__ == "__main__":
    (Path(__file__).resolve().parent / "padding.svg").write_text(picture(), encoding="utf-8")
