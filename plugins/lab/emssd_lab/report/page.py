"""Writes sections as a page: Markdown with its plots, and by ``page.html`` one HTML file without scripts."""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from jinja2 import Template
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from emssd.errors import OutputError
from emssd_lab.report.sections import Plot, Section
from emssd_lab.report.tables import escape

__all__ = ["report"]

_INTRODUCTION = (
    "Figures are medians of the repeats, with the least and the greatest in brackets and as bars in plots. A speed-up "
    "is a ratio to plain greedy decoding on the same kernels within a repeat. docs/reports.md has all formulas."
)
_WIDE = 32  # characters from which on a table's cell is wrapped


def report(sections: Seq[Section], out: Path, *, title: str, name: str) -> list[Path]:
    """Write a page of these sections in the folder `out`: Markdown with its plots as files, and one HTML file."""
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    images = {f"{name}_{plot.name}.svg": plot.svg for plot in plots}
    parts = [f"# {escape(title)}", _INTRODUCTION, *(section.markdown(name) for section in sections)]
    markdown = "\n\n".join(parts) + "\n"
    files = {f"{name}.md": markdown, f"{name}.html": _html(title, markdown, images), **images}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write the report to {out}: {error.strerror}; choose a folder with --out") from error
    return [out / file for file in files]


def _html(title: str, markdown: str, images: dict[str, str]) -> str:
    """The page with its styles and images inside. Raw HTML in the text is shown, not interpreted."""

    def image(self: RendererHTML, tokens: Seq[Token], index: int, options: Any, env: Any) -> str:
        alt = "".join(child.content for child in tokens[index].children or ())
        data = base64.b64encode(images[str(tokens[index].attrs["src"])].encode()).decode()
        return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}" />'

    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.add_render_rule("image", image)
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens, links = parser.parse(markdown), dict[str, str]()
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open" and opening.tag == "h2":
            opening.attrSet("id", name := f"s{len(links) + 1}")
            links[name] = "".join(child.content for child in content.children or ())
        elif opening.type == "td_open" and len(content.content) > _WIDE:
            opening.attrSet("class", "wide")
    first, end, rest = parser.renderer.render(tokens, parser.options, {}).partition("</h1>\n")
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"), autoescape=True)
    text: str = page.render(title=title, heading=first + end, links=links.items(), body=rest)
    return text + "\n"
