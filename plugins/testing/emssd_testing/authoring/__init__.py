"""``emssd-plugins`` and ``python -m emssd_testing.authoring``: lists plugins, checks them and makes new ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emssd_testing.authoring.watched import Notes

from emssd.cli.terminal import steady

__all__ = ["QUICK", "main", "make_parser"]

QUICK = 6
"""Examples of each test in a check that is not thorough. So many find every planted fault."""


@steady("emssd-plugins")
def main(arguments: Seq[str] | None = None) -> None:
    """Run one of the commands; without any, list all plugins.

    What loads plugins runs in a process of its own, unless `arguments` are given: who calls it from Python has one.
    Exits with 1 if a plugin failed to load, or broke a rule, and with 2 for an error of the user's.
    """
    from emssd_testing.authoring.watched import Notes, run_watched

    notes, status = Notes(os.environ.pop(Notes.variable, None)), 2
    try:
        options = make_parser().parse_args(arguments)
        if arguments is None and options.command != "new" and not notes.is_watched:
            status = run_watched(sys.argv[1:])
        else:
            status = _run(options, notes)
    finally:
        notes.done(status)
    if status:
        raise SystemExit(status)


def _run(options: argparse.Namespace, notes: Notes) -> int:
    match options.command:
        case "check":
            from emssd_testing.authoring.check import check

            return check(options, notes)
        case "new":
            from emssd_testing.authoring.new import new_plugin

            folder = new_plugin(options.kind, options.name, options.folder)
            print(
                f"{folder} is a complete plugin, {options.kind}={options.name}; its README.md says what to do with it"
            )
            return 0
        case "inspect":
            from emssd_testing.authoring.inspect import inspect

            lines, usable = inspect(options.path)
            print("\n".join(lines))
            return int(not usable)
    from emssd_testing.authoring.inspect import print_plugins

    return print_plugins(notes)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="emssd-plugins",
        description="Lists plugins, tests one against the rules of its interface, or writes a new one.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="drafters, backends, budget policies and prompt sources (the default)")
    check = commands.add_parser("check", help="run the conformance suite on an installed plugin")
    check.add_argument("name", metavar="NAME", help="as in drafter=NAME, backend=NAME or budget=NAME")
    check.add_argument("options", metavar="OPTION=VALUE", nargs="*", help="options of the plugin, as in length=3")
    check.add_argument("--kind", choices=["drafter", "backend", "budget"], help="where several have this name")
    examples = check.add_mutually_exclusive_group()
    examples.add_argument("--examples", type=int, metavar="N", help=f"draw so many for each test (default: {QUICK})")
    examples.add_argument(
        "--thorough", action="store_true", help="draw as many as the test class does, and make what fails small"
    )
    check.add_argument("--model", metavar="DIR", help="the target of a drafter that was trained for one")
    check.add_argument(
        "--timeout", type=_seconds, default=600, metavar="SECONDS", help="the most for one test (default: 600)"
    )
    check.add_argument(
        "--learns-across-requests", action="store_true", help="the drafter means to, so its drafts may depend on others"
    )
    check.add_argument(
        "--decides-at-random", action="store_true", help="the plugin means to, so what it decides is not compared"
    )
    inspect = commands.add_parser("inspect", help="what a checkpoint is, and which drafter reads it")
    inspect.add_argument("path", metavar="PATH", help="folder, file of weights or hub id")
    new = commands.add_parser("new", help="write a new plugin, complete with tests")
    new.add_argument("kind", choices=["drafter", "budget"], help="what it offers")
    new.add_argument("name", metavar="NAME", help="as in drafter=NAME or budget=NAME")
    new.add_argument("--folder", type=Path, metavar="DIR", help="where it goes (default: emssd-NAME, here)")
    return parser


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError(text)
    return number
