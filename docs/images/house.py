"""Draws docs/images/house.svg: the rooms of emssd/ in floors, the plugins beside them, and the way of a step.

``python docs/images/house.py`` writes it. The floors are those of the import contract in pyproject.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH, FLOOR, LEFT, ROOMS, BESIDE = 800, 42, 20, 480, 560  # pixels
GREY, BLUE, ORANGE, GREEN = "#808590", "#2f7fd6", "#d9782d", "#2e9e6b"
HOLDS = {
    "integrations": "doors: Transformers, TRL, vLLM, …",
    "cli": "the command",
    "draft_models": "models that draft",
    "decoding": "the loop",
    "hooks": "finds plugins",
    "drafting": "drafts and budgets",
    "model": "hf, load, compile, run",
    "data": "prompts, model folders",
    "metrics": "figures of steps and runs",
    "sequences": "requests and rows",
    "sampling": "the next token",
    "attention": "backends, KV",
    "native": "C++ kernels",
    "errors": "for users and plugins",
}
STEP = {  # a room's part in a step
    "decoding": "1 select · 3 pack · 6 verify",
    "drafting": "2 propose",
    "model": "4 run",
    "sequences": "7 advance",
    "sampling": "5 choose",
    "attention": "4 attend",
}
PLUGINS = {  # the room beside which they are drawn: name, contents
    "integrations": ("emssd_lab", "reports, experiments"),
    "draft_models": ("emssd_heads", "trained heads, training"),
    "decoding": ("emssd_testing", "the kit for authors"),
    "drafting": ("drafters", "suffix, union, cascade, …"),
    "model": ("budget policies", "adaptive"),
    "attention": ("attention backends", "ragged, flashinfer, padded"),
}


def floors() -> list[list[str]]:
    """The rooms of each floor, from the top, by the import contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["emssd"])
    return [layer.split(" | ") for layer in layers if layer != "__main__"]


def picture() -> str:
    """The SVG."""
    house, top = floors(), 50
    height = top + FLOOR * len(house) + 40
    tops = {room: top + FLOOR * number for number, rooms in enumerate(house) for room in rooms}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        'font-family="sans-serif" font-size="15">',
        "<title>The rooms of emssd in floors, and the plugins beside them</title>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">',
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>',
        _text(LEFT, 30, "emssd/: a room imports only rooms below it", GREY),
        _text(BESIDE, 30, "plugins/: import public names", GREY),
    ]
    for rooms in house:
        width = (ROOMS - 6 * (len(rooms) - 1)) // len(rooms)
        for number, room in enumerate(rooms):
            lines += _room(LEFT + number * (width + 6), tops[room], width, room)
    for beside, (name, holds) in PLUGINS.items():
        y = tops[beside]
        lines += [_box(BESIDE, y, 220, ORANGE), _text(BESIDE + 10, y + 16, name, ORANGE)]
        lines += [_text(BESIDE + 10, y + 32, holds, GREY), _arrow(BESIDE, y + FLOOR // 2, LEFT + ROOMS, y + FLOOR // 2)]
    y = tops["hooks"] + FLOOR // 2
    lines += [
        _arrow(LEFT + ROOMS, y, BESIDE, y, dashed=True),
        _text(BESIDE + 10, y + 5, "loads plugins", GREY),
        _text(LEFT, height - 20, "green: one step, in order", GREEN),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _room(x: int, y: int, width: int, room: str) -> Iterator[str]:
    yield _box(x, y, width, BLUE)
    yield _text(x + 10, y + 16, room)
    yield _text(x + 10, y + 32, HOLDS[room], GREY)
    if room in STEP:
        yield _text(x + width - 8, y + 24, STEP[room], GREEN, "end")


def _box(x: int, y: int, width: int, colour: str) -> str:
    size = f'x="{x}" y="{y}" width="{width}" height="{FLOOR - 4}"'
    return f'<rect {size} rx="4" fill="{colour}" fill-opacity="0.12" stroke="{colour}"/>'


def _arrow(x: int, y: int, to_x: int, to_y: int, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="M{x},{y} L{to_x},{to_y}" stroke="{GREY}" fill="none"{dashes} marker-end="url(#tip)"/>'


def _text(x: int, y: int, words: str, colour: str = BLUE, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
