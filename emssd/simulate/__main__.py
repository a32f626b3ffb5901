"""``python -m emssd.simulate``: runs without a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq

from emssd.errors.terminal import steady
from emssd.simulate import commands

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The command line; what it parses has an ``action`` to call with the result."""
    parser = argparse.ArgumentParser(
        prog="python -m emssd.simulate",
        description="Speculative decoding without a model: acceptance traces through the real scheduler and budget "
        "policies, with a step-time curve. All seconds are simulated. See docs/simulator.md.",
        epilog="COMMAND --help tells the options of a command.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (commands.add_run, commands.add_record):
        add(subparsers)
    return parser


@steady("emssd.simulate")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it."""
    parsed = make_parser().parse_args(arguments)
    parsed.action(parsed)


if __name__ == "__main__":
    main()
