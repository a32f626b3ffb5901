"""Makes a page of Markdown one self-contained HTML file: styles and images inside, no scripts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

__all__ = ["html_page"]

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #fff; --soft: #666; --line: #ddd; --fill: #f6f6f4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e2; --page: #191919; --soft: #a0a09c; --line: #3c3c3a; --fill: #242422; }
  img { filter: invert(.9) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem clamp(.8rem, 3vw, 2rem) 4rem; color: var(--text);
  background: var(--page); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p, ul { max-width: 52rem; margin: .6rem 0; }
ul { padding-left: 1.2rem; }
p.images { max-width: none; display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 .2rem; }
p.images img { flex: 0 1 auto; }
img { max-width: 100%; height: auto; }
p.caption, small { color: var(--soft); font-size: .88rem; }
.scroll { overflow-x: auto; margin: .8rem 0; --none: transparent; background:
  linear-gradient(to right, var(--page) 40%, var(--none)) left / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, var(--none)) right / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--line), var(--none)) left / .7rem 100% no-repeat scroll,
  linear-gradient(to left, var(--line), var(--none)) right / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; overflow-wrap: normal; }
th { background: var(--fill); text-align: left; white-space: normal; vertical-align: bottom; }
li { margin: .25rem 0; }
td.wide { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }
tbody tr:hover { background: var(--fill); }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--fill);
  padding: .08em .3em; border-radius: .25em; }
blockquote { margin: .8rem 0; padding: .1rem 1rem; border-left: .3rem solid #d9822b; background: var(--fill); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; max-width: none; }
a { color: inherit; text-decoration-color: var(--soft); }
@media (max-width: 40rem) {
  table { font-size: .8rem; }
  th, td { padding: .2rem .35rem; }
  td.wide { min-width: 11rem; }
}
@media print {
  :root { color-scheme: light; --text: #000; --page: #fff; --soft: #444; --line: #bbb; --fill: #f2f2f2; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  img { filter: none; max-height: 11cm; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  td, th { padding: .1rem .35rem; white-space: normal; }
  h2, h3 { break-after: avoid; }
  tr, img, p.images { break-inside: avoid; }
  nav { display: none; }
}
"""

_WIDE = 32  # characters of a table's cell from which on it is wrapped


def html_page(title: str, markdown: str, images: Mapping[str, str]) -> str:
    """The page.

    Args:
        title: of the page.
        markdown: its text; raw HTML in it is shown, not interpreted.
        images: SVG of each image that the text refers to, by its name there.
    """
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.add_render_rule("image", _image(images))
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    headings = _number_headings(tokens)
    _class_paragraphs(tokens)
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


def _number_headings(tokens: Seq[Token]) -> list[tuple[str, str]]:
    """Give sections ids, and return them with their titles."""
    found: list[tuple[str, str]] = []
    for opening, content in zip(tokens, tokens[1:], strict=False):  # noqa: RUF007  # what it is reads better so
        if opening.type == "heading_open" and opening.tag == "h2":
            name = f"s{len(found) + 1}"
            opening.attrSet("id", name)
            found.append((name, "".join(each.content for each in content.children or ())))
    return found


def _class_paragraphs(tokens: Seq[Token]) -> None:
    """Mark paragraphs of images, their captions, and long cells of tables."""
    after_images = False
    for opening, content in zip(tokens, tokens[1:], strict=False):  # noqa: RUF007
        if opening.type == "paragraph_open":
            kinds = {child.type for child in content.children or ()}
            if "image" in kinds and kinds <= {"image", "softbreak"}:
                opening.attrSet("class", "images")
                after_images = True
            elif after_images:
                opening.attrSet("class", "caption")
                after_images = False
        elif opening.type.endswith("_open") and opening.type != "td_open":
            after_images = False  # it had no caption
        elif opening.type == "td_open" and len(content.content) > _WIDE:
            opening.attrSet("class", "wide")
