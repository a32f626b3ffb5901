"""``python -m emssd.report``: a page of what experiments, runs and comparisons showed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence as Seq
from pathlib import Path

from emssd.console.terminal import steady
from emssd.errors import ConfigError, exit_on_error

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m emssd.report",
        description="Makes a page of experiments, runs, and comparisons with other engines: Markdown with its plots, "
        "and one HTML file that needs nothing else. See docs/reports.md.",
    )
    what = (
        "folder of an experiment or of runs (searched through), rows.jsonl, or a JSON file of benchmarks/cpu_peers.py"
    )
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
    """Parse the command line and make the report; an error of ours ends with its message and status 2."""
    with exit_on_error("emssd.report"):
        options = make_parser().parse_args(arguments)
        if not re.fullmatch(r"[\w.-]+", options.name):
            raise ConfigError(
                f"--name is {options.name!r}; it names files, so give letters, digits, '.', '_' and '-' only"
            )
        from emssd.report.write import report

        written = report(options.runs, options.out, title=options.title, name=options.name)
        markdown, page, *plots = written
        beside = f", with {len(plots)} {'plot' if len(plots) == 1 else 'plots'} beside it" if plots else ""
        print(f"{page}\n{markdown}{beside}")


if __name__ == "__main__":
    main()
