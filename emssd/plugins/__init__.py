"""``emssd-plugins`` and ``python -m emssd.plugins``: what is installed, whether it keeps the rules, and a new one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from pathlib import Path

__all__ = ["main"]


def main(arguments: Seq[str] | None = None) -> None:
    """Run one of the commands; without any, list all plugins.

    Exits with 1 if a plugin failed to load, or broke a rule, and with 2 for an error of the user's.
    """
    from emssd.errors import exit_on_error

    with exit_on_error("emssd-plugins"):
        if status := _run(_parser().parse_args(arguments)):
            raise SystemExit(status)


def _run(given: argparse.Namespace) -> int:
    match given.command:
        case "check":
            from emssd.plugins.check import check

            return check(
                given.name,
                given.options,
                kind=given.kind,
                num_examples=given.examples,
                learns_across_requests=given.learns_across_requests,
            )
        case "new":
            from emssd.plugins.new import new_drafter

            folder = new_drafter(given.name, given.folder)
            print(f"{folder} is a complete plugin, drafter={given.name}; its README.md says what to do with it")
            return 0
    from emssd.plugins.listing import print_plugins

    return print_plugins()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="emssd-plugins", description="Lists plugins, holds one to the rules of its interface, or writes a new one."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="drafters, backends, budget policies and prompt sources (the default)")
    check = commands.add_parser("check", help="run the conformance suite on an installed plugin")
    check.add_argument("name", metavar="NAME", help="as in drafter=NAME or backend=NAME")
    check.add_argument("options", metavar="OPTION=VALUE", nargs="*", help="options of the plugin, as in length=3")
    check.add_argument("--kind", choices=["drafter", "backend"], help="where one of each has this name")
    check.add_argument("--examples", type=int, metavar="N", help="how many examples to draw for each test")
    check.add_argument(
        "--learns-across-requests", action="store_true", help="the drafter means to, so its drafts may depend on others"
    )
    new = commands.add_parser("new", help="write a new plugin, complete with tests")
    new.add_argument("kind", choices=["drafter"], help="what it offers")
    new.add_argument("name", metavar="NAME", help="as in drafter=NAME")
    new.add_argument("--folder", type=Path, metavar="DIR", help="where it goes (default: emssd-NAME, here)")
    return parser
