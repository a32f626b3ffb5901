"""Makes a page of Markdown one self-contained HTML file, by ``page.html``: styles and images inside, no scripts."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

__all__ = ["html_page"]

_WIDE = 32  # characters from which on a table's cell is wrapped


def html_page(title: str, markdown: str, images: Mapping[str, str]) -> str:
    """The page.

    Args:
        markdown: its text; raw HTML in it is shown, not interpreted.
        images: SVG of each image that the text refers to, by its name there.
    """

    def image(self: RendererHTML, tokens: Seq[Token], index: int, options: Any, env: Any) -> str:
        alt = "".join(child.content for child in tokens[index].children or ())
        data = base64.b64encode(images[str(tokens[index].attrs["src"])].encode()).decode()
        return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}" />'

    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.add_render_rule("image", image)
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in _name_parts(tokens))
    first, end, rest = parser.renderer.render(tokens, parser.options, {}).partition("</h1>\n")
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(title=escape(title), heading=first + end, links=links, body=rest)


def _name_parts(tokens: Seq[Token]) -> list[tuple[str, str]]:
    """Give sections ids, and return them with their titles; mark the long cells of tables."""
    found: list[tuple[str, str]] = []
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open" and opening.tag == "h2":
            name = f"s{len(found) + 1}"
            opening.attrSet("id", name)
            found.append((name, "".join(each.content for each in content.children or ())))
        elif opening.type == "td_open" and len(content.content) > _WIDE:
            opening.attrSet("class", "wide")
    return found
