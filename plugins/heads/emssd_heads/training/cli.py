"""``emssd-train``: trains a drafter for a target on the target's own texts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence as Seq
from typing import Any, Literal, get_args, get_origin

from rich.table import Table

from emssd.cli.option_texts import OptionText, introduction, option_texts
from emssd.cli.terminal import plain_console, steady
from emssd.errors import ConfigError
from emssd_heads.training.options import Eagle3Options, MedusaOptions, PardOptions, TrainOptions

__all__ = ["main"]

_DESCRIPTION = (
    "The target continues each prompt of a file, and the drafter learns from these texts. Then prompts that it has not "
    "seen are decoded with it, to see what is accepted."
)
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def make_parser() -> argparse.ArgumentParser:
    """The command line. What it parses has the fields of the options of a kind, and these as ``options``."""
    parser = argparse.ArgumentParser(
        prog="emssd-train", description="Trains a drafter for a target on the target's own texts."
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for options in (Eagle3Options, MedusaOptions, PardOptions):
        what = " ".join(introduction(options).split())
        description = f"{what} {_DESCRIPTION} Draft with drafter={options.kind} drafter.path=DIR."
        one = kinds.add_parser(options.kind, help=what.partition(".")[0], description=description, allow_abbrev=False)
        one.set_defaults(options=options)
        prompt = one.add_mutually_exclusive_group()
        for option in option_texts(options):
            _add(prompt if option.name in ("field", "template") else one, option)
    return parser


def _add(group: argparse._ActionsContainer, option: OptionText) -> None:
    flag = f"--{option.name.replace('_', '-')}"
    text = option.text.rstrip(".").replace("`", "").replace("%", "%%")
    kind: Any = next((part for part in get_args(option.kind) if part is not type(None)), option.kind)
    if kind is bool:
        group.add_argument(flag, action="store_true", help=text)
        return
    if not option.is_needed and option.default is not None:
        text += f" (default: {option.default})"
    more: dict[str, Any] = {"type": kind, "metavar": _METAVARS.get(kind)}
    if get_origin(kind) is Literal:
        more = {"choices": get_args(kind)}
    elif get_origin(kind) is tuple:
        more = {"action": _Numbers, "metavar": "A,B,C"}
    group.add_argument(flag, required=option.is_needed, default=option.default, help=text, **more)


class _Numbers(argparse.Action):
    def __call__(self, parser: object, into: argparse.Namespace, value: object, flag: str | None = None) -> None:
        try:
            setattr(into, self.dest, tuple(int(number) for number in str(value).split(",")))
        except ValueError:
            raise ConfigError(f"{flag} is {value!r}; give whole numbers, as in 2,6,9") from None


@steady("emssd-train", if_interrupted="--resume goes on from the last checkpoint")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # not a line for every attempt to reach the hub
    parsed = vars(make_parser().parse_args(arguments))
    _run(parsed.pop("options")(**parsed))


def _run(options: TrainOptions) -> None:
    from emssd_heads.training.job import run

    if (acceptance := run(options, plain_console(stderr=True))) is not None:
        table = Table("depth", "drafted", "accepted", "share", title=f"held-out prompts: τ {acceptance['tau']:.2f}")
        for depth, counts in enumerate(zip(acceptance["drafted"], acceptance["accepted"], strict=True), start=1):
            table.add_row(str(depth), *map(str, counts), f"{counts[1] / counts[0]:.1%}")
        plain_console().print(table)
    print(f"{options.output}: use it with drafter={options.kind} drafter.path={options.output}")


if __name__ == "__main__":
    main()
