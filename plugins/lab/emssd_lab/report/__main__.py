"""``python -m emssd_lab.report``: a page of what experiments and runs showed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence as Seq
from pathlib import Path

from emssd.cli.terminal import steady
from emssd.errors import ConfigError
from emssd_lab import check_extra

__all__ = ["make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m emssd_lab.report",
        description="Makes a page of experiments and runs: Markdown with its plots, and one HTML file that needs "
        "nothing else. See docs/reports.md.",
    )
    runs = "folder of an experiment or of runs (searched through), or rows.jsonl"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help=runs)
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="where to write (default: report)"
    )
    parser.add_argument("--title", default="Results of emssd", metavar="TEXT", help="of the page")
    parser.add_argument(
        "--name", default="report", metavar="NAME", help="of the files, without ending (default: report)"
    )
    return parser


@steady("emssd_lab.report")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and make the report."""
    options = make_parser().parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise ConfigError(f"--name is {options.name!r}; it names files, so give letters, digits, '.', '_' and '-' only")
    check_extra("a report", "jinja2", "matplotlib", "pandas")
    from emssd_lab.report.page import report
    from emssd_lab.report.rows import read
    from emssd_lab.report.sections import sections
    from emssd_lab.report.sections.origins import failed_runs

    shown = [*sections(read(options.runs)), *failed_runs(options.runs)]
    markdown, page, *plots = report(shown, options.out, title=options.title, name=options.name)
    beside = f", with {len(plots)} {'plot' if len(plots) == 1 else 'plots'} beside it" if plots else ""
    print(f"{page}\n{markdown}{beside}")


if __name__ == "__main__":
    main()
