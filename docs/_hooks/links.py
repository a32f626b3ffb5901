"""A hook of MkDocs: links that lead out of docs/ work in the repository, and are plain text on the site."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["moved", "on_page_markdown", "rewritten"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_log = logging.getLogger("mkdocs.hooks.links")
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    if not page.file.abs_src_path:  # made at build time, with its links
        return markdown
    return rewritten(markdown, Path(page.file.abs_src_path), page.file.src_uri)


def moved(source: Path, uri: str) -> str:
    """The text of a file of the repository as the page `uri`."""
    return rewritten(source.read_text(encoding="utf-8"), source, uri)


def rewritten(markdown: str, source: Path, uri: str) -> str:
    """The links of `markdown`, the text of the file `source`, as they are right on the page `uri`.

    A link to a page or file of docs/ leads there; one to a folder, or out of docs/, becomes text. A target that does
    not exist is a warning, which ends a strict build.
    """

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match["path"]))
        if not target.exists() and not target.is_relative_to(DOCS):  # MkDocs itself knows what is missing in docs/
            _log.warning(f"{source.relative_to(ROOT)} links to {match['path']}, which does not exist")
        if target == ROOT / "CHANGELOG.md" or target == ROOT / "CONTRIBUTING.md":
            target = DOCS / target.name.lower()
        if not target.is_relative_to(DOCS) or target.is_dir():
            return match["text"]
        there = os.path.relpath(target, (DOCS / uri).parent)
        return f"[{match['text']}]({Path(there).as_posix()}{match['anchor'] or ''})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)
