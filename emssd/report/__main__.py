"""``python -m emssd.report``: a page of what experiments and runs showed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from emssd.errors import ConfigError, OutputError
from emssd.errors.terminal import steady

if TYPE_CHECKING:
    from emssd.report.sections import Section

__all__ = ["main", "make_parser", "report"]

_INTRODUCTION = (
    "Figures are medians of the repeats, with the least and the greatest in brackets and as bars in plots. A speed-up "
    "is a ratio to plain greedy decoding on the same kernels within a repeat. docs/reports.md has all formulas."
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m emssd.report",
        description="Makes a page of experiments and runs: Markdown with its plots, and one HTML file that needs "
        "nothing else. See docs/reports.md.",
    )
    what = "folder of an experiment or of runs (searched through), or rows.jsonl"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help=what)
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="where to write (default: report)"
    )
    parser.add_argument("--title", default="Results of emssd", metavar="TEXT", help="of the page")
    parser.add_argument(
        "--name", default="report", metavar="NAME", help="of the files, without ending (default: report)"
    )
    return parser


@steady("emssd.report")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and make the report."""
    options = make_parser().parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise ConfigError(f"--name is {options.name!r}; it names files, so give letters, digits, '.', '_' and '-' only")
    from emssd.report.rows import read
    from emssd.report.sections import sections

    found = sections(read(options.runs))
    markdown, page, *plots = report(found, options.out, title=options.title, name=options.name)
    beside = f", with {len(plots)} {'plot' if len(plots) == 1 else 'plots'} beside it" if plots else ""
    print(f"{page}\n{markdown}{beside}")


def report(found: Seq[Section], out: Path, *, title: str, name: str) -> list[Path]:
    """Write a page of these sections in the folder `out`: Markdown with its plots as files, and one HTML file. Raises
    OutputError: the files cannot be written.
    """
    from emssd.report.page import html_page
    from emssd.report.sections import Plot
    from emssd.report.tables import escape

    plots = [block for section in found for block in section.blocks if isinstance(block, Plot)]
    images = {f"{name}_{plot.name}.svg": plot.svg for plot in plots}
    parts = [f"# {escape(title)}", _INTRODUCTION, *(section.markdown(name) for section in found)]
    markdown = "\n\n".join(parts) + "\n"
    files = {f"{name}.md": markdown, f"{name}.html": html_page(title, markdown, images), **images}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write the report to {out}: {error.strerror}; choose a folder with --out") from error
    return [out / file for file in files]


if __name__ == "__main__":
    main()
