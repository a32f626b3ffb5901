"""Draws docs/images/tree.svg: one step of three rows, for docs/tutorial/draft_a_tree.md. One of them drafts a tree.

``python docs/images/tree.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

WIDTH, HEIGHT, SIZE = 720, 480, 30
GREY, BLUE, GREEN = "#808590", "#2f7fd6", "#2e9e6b"
ROWS = [  # newest token, drafted tokens, their parents, the accepted ones
    ("a", ["b", "c", "d", "e", "f"], [-1, -1, 0, 0, 2], [0, 3]),
    ("p", ["q", "r"], [-1, 0], [0, 1]),
    ("x", [], [], []),
]


def picture() -> str:
    """The SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="15" text-anchor="middle">',
        "<title>One step of three rows: a tree, a chain and no draft</title>",
    ]
    left = 20
    lines.append(_text(left, 24, "three rows draft a tree, a chain, nothing", "start"))
    for newest, tokens, parents, accepted in ROWS:
        drawn, width = _tree(left, 44, newest, tokens, parents, accepted)
        lines += drawn
        left += width + 46
    lines.append(_text(20, 258, "fed to the model: 10 tokens, at positions by depth", "start"))
    x = 20
    for newest, tokens, parents, accepted in ROWS:
        for node, token in enumerate([newest, *tokens]):
            lines += _cell(x, 270, token, _kind(node - 1, accepted))
            lines.append(_text(x + SIZE // 2, 320, f"+{_depth(node - 1, parents)}"))
            x += SIZE + 4
    lines.append(_text(20, 362, "KV cache afterwards, behind what was there: accepted ways, moved together", "start"))
    x = 20
    for newest, tokens, _, accepted in ROWS:
        for node in (-1, *accepted):
            lines += _cell(x, 374, newest if node < 0 else tokens[node], _kind(node, accepted))
            x += SIZE + 4
        x += 20
    lines += _mask(430, 44)
    x = 20
    for kind, name, words in (("newest", "a", "newest token"), ("kept", "e", "accepted"), ("draft", "b", "rejected")):
        lines += _cell(x, HEIGHT - 46, name, kind)
        lines.append(_text(x + SIZE + 8, HEIGHT - 26, words, "start"))
        x += SIZE + 40 + 8 * len(words)
    return "\n".join([*lines, "</svg>", ""])


def _mask(left: int, top: int) -> Iterator[str]:
    """The mask of the first row."""
    newest, tokens, parents, accepted = ROWS[0]
    names = [newest, *tokens]
    yield _text(left - 6, 24, "what each token of the tree sees", "start")
    for query, name in enumerate(names):
        y = top + 20 + query * (SIZE + 4)
        yield _text(left + 8, y + 21, name)
        seen, at = {-1}, query - 1
        while at >= 0:
            seen.add(at)
            at = parents[at]
        yield from _cell(left + 24, y, "…", "old")
        for key in range(-1, len(tokens)):
            x = left + 24 + (key + 2) * (SIZE + 4)
            if key in seen:
                yield from _cell(x, y, names[key + 1], _kind(key, accepted))
            else:
                yield _box(x, y, "none", GREY, ' stroke-opacity="0.35"')


def _tree(
    left: int, top: int, newest: str, tokens: list[str], parents: list[int], accepted: list[int]
) -> tuple[list[str], int]:
    """A tree from top to bottom, and its width."""
    places: dict[int, tuple[int, int]] = {}
    right = left

    def place(node: int) -> int:
        nonlocal right
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children:
            xs = [place(child) for child in children]
            x = (xs[0] + xs[-1]) // 2
        else:
            x = right
            right += SIZE + 16
        places[node] = (x, top + 48 * _depth(node, parents))
        return x

    place(-1)
    half = SIZE // 2
    lines = [
        f'<line x1="{places[parent][0] + half}" y1="{places[parent][1] + half}" x2="{places[node][0] + half}" '
        f'y2="{places[node][1] + half}" stroke="{GREY}" stroke-width="2"/>'
        for node, parent in enumerate(parents)
    ]
    for node, (x, y) in sorted(places.items()):
        lines.append(_box(x, y, "white", "white", ""))
        lines += _cell(x, y, newest if node < 0 else tokens[node], _kind(node, accepted))
    return lines, right - left - 16


def _depth(node: int, parents: list[int]) -> int:
    return 0 if node < 0 else 1 + _depth(parents[node], parents)


def _kind(node: int, accepted: list[int]) -> str:
    return "newest" if node < 0 else "kept" if node in accepted else "draft"


def _cell(x: int, y: int, token: str, kind: str) -> list[str]:
    colour, opacity = {"old": (GREY, 0.35), "newest": (BLUE, 0.9), "kept": (GREEN, 0.85), "draft": (BLUE, 0.3)}[kind]
    return [
        _box(x, y, colour, colour, f' fill-opacity="{opacity}"'),
        f'<text x="{x + SIZE // 2}" y="{y + 21}" fill="{"white" if opacity > 0.5 else GREY}">{token}</text>',
    ]


def _box(x: int, y: int, fill: str, outline: str, more: str) -> str:
    size = f'width="{SIZE}" height="{SIZE}" rx="4"'
    return f'<rect x="{x}" y="{y}" {size} fill="{fill}" stroke="{outline}" stroke-width="2"{more}/>'


def _text(x: int, y: int, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{GREY}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    (Path(__file__).resolve().parent / "tree.svg").write_text(picture(), encoding="utf-8")
