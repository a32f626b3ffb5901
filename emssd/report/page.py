"""Makes a page of Markdown one self-contained HTML file: styles and images inside, no scripts."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

__all__ = ["html_page"]

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #fff; --line: #ddd; --fill: #f6f6f4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e2; --page: #191919; --line: #3c3c3a; --fill: #242422; }
  img { filter: invert(.9) hue-rotate(180deg); }
}
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem clamp(.8rem, 3vw, 2rem) 4rem; color: var(--text);
  background: var(--page); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
img { max-width: 100%; height: auto; margin: .4rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; overflow-wrap: normal; }
th { background: var(--fill); text-align: left; white-space: normal; vertical-align: bottom; }
td.wide { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
code { font: .86em ui-monospace, Consolas, monospace; background: var(--fill); padding: .08em .3em; }
blockquote { margin: .8rem 0; padding: .1rem 1rem; border-left: .3rem solid #d9822b; background: var(--fill); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
a { color: inherit; }
@media print {
  :root { color-scheme: light; --text: #000; --page: #fff; }
  body { max-width: none; font-size: 9.5pt; }
  img { filter: none; max-height: 11cm; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { white-space: normal; }
  tr, img { break-inside: avoid; }
}
"""

_WIDE = 32  # characters from which on a table's cell is wrapped


def html_page(title: str, markdown: str, images: Mapping[str, str]) -> str:
    """The page.

    Args:
        markdown: its text; raw HTML in it is shown, not interpreted.
        images: SVG of each image that the text refers to, by its name there.
    """
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.add_render_rule("image", _image(images))
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    headings = _name_parts(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    first, end, rest = body.partition("</h1>\n")
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in headings)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{first}{end}<nav><ul>{links}</ul></nav>\n{rest}</body>\n</html>\n"
    )


def _image(images: Mapping[str, str]) -> Any:
    def render(self: RendererHTML, tokens: Seq[Token], index: int, options: Any, env: Any) -> str:
        name = str(tokens[index].attrs["src"])
        alt = "".join(child.content for child in tokens[index].children or ())
        data = base64.b64encode(images[name].encode()).decode()
        return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}" />'

    return render


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
