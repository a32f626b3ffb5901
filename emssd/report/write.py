"""Writes a report: Markdown with its plots as files beside it, and one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from emssd.errors import OutputError
from emssd.report.page import html_page
from emssd.report.sections import Plot, Section, sections
from emssd.report.sources import read
from emssd.report.text import escape

__all__ = ["report"]


def report(runs: Iterable[Path], out: Path, *, title: str, name: str) -> list[Path]:
    """Make the report of `runs`.

    Args:
        runs: what to show, see `emssd.report.sources.read`.
        out: folder to write to; made if it is not there.
        title: of the page.
        name: of its files, without an ending.

    Returns:
        The files: Markdown, HTML, plots.

    Raises:
        ConfigError: what was given cannot be shown, or there is no matplotlib.
        OutputError: the files cannot be written.
    """
    found = sections(read(runs))
    images = {f"{name}_{plot.name}.svg": plot.svg for section in found for plot in _plots(section)}
    markdown = _markdown(title, name, found)
    files = {f"{name}.md": markdown, f"{name}.html": html_page(title, markdown, images), **images}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write the report to {out}: {error.strerror}; choose a folder with --out") from error
    return [out / file for file in files]


def _plots(section: Section) -> list[Plot]:
    return [plot for block in section.blocks if not isinstance(block, str) for plot in block[0]]


def _markdown(title: str, name: str, found: Sequence[Section]) -> str:
    parts = [f"# {escape(title)}"]
    for section in found:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(block)
                continue
            plots, caption = block
            parts.append("\n".join(f"![{escape(plot.alt)}]({name}_{plot.name}.svg)" for plot in plots))
            parts += [caption] if caption else []
    return "\n\n".join(parts) + "\n"
