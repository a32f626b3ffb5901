"""A hook of MkDocs: the pages that are made of something else, and the list of decisions in the navigation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from links import moved
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

__all__ = ["on_config", "on_files"]

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"

_DECISIONS_HEAD = """# Decisions

What a stranger would question, with its reason and what it replaced, half a page each.

"""


def on_config(config: MkDocsConfig) -> None:
    """Replace ``decisions/`` in the navigation by the files of that folder."""
    files = [f"decisions/{name}" for name in ("index.md", *sorted(path.name for path in DECISIONS.glob("*.md")))]
    config.nav = _expanded(config.nav, "decisions/", files)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what is made at build time."""
    made: dict[str, Callable[[], str]] = {
        "decisions/index.md": decisions,
        "changelog.md": lambda: moved(ROOT / "CHANGELOG.md", "changelog.md"),
        "contributing.md": lambda: moved(ROOT / "CONTRIBUTING.md", "contributing.md"),
    }
    for uri, make in made.items():
        files.append(File.generated(config, uri, content=make()))


def decisions() -> str:
    """The Markdown of the index of decisions."""
    lines = []
    for path in sorted(DECISIONS.glob("*.md")):
        number, _, title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        lines.append(f"{number}. [{title}]({path.name})\n")
    return _DECISIONS_HEAD + "".join(lines)


def _expanded(nav: Any, name: str, files: list[str]) -> Any:
    if isinstance(nav, list):
        return [_expanded(entry, name, files) for entry in nav]
    if isinstance(nav, dict):
        return {title: _expanded(entry, name, files) for title, entry in nav.items()}
    return files if nav == name else nav
