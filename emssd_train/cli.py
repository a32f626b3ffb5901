"""``emssd-train``: trains a drafter for a target on the target's own texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Seq

from emssd.console.terminal import INTERRUPTED, plain_console, steady
from emssd.errors import ConfigError, exit_on_error
from emssd_train.options import TrainOptions

__all__ = ["main", "make_parser"]

_DESCRIPTION = """\
Train an EAGLE-3 head for a target. The target continues each prompt of a file. The head learns from these texts, and
from what the target computes as it reads them. Then prompts that it has not seen are decoded with it, to see what is
accepted. It is saved in a container of speculators: use it with drafter=eagle3 drafter.path=DIR.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line; what it parses has the fields of `TrainOptions`."""
    parser = argparse.ArgumentParser(
        prog="emssd-train", description="Trains a drafter for a target on the target's own texts."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    eagle3 = kinds.add_parser("eagle3", help="train an EAGLE-3 head", description=_DESCRIPTION)
    eagle3.add_argument("--model", required=True, metavar="MODEL", help="the target's folder or hub id, or demo")
    eagle3.add_argument("--data", required=True, metavar="FILE", help=".jsonl with a prompt per line")
    eagle3.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    eagle3.add_argument("--resume", action="store_true", help="go on with DIR, with the same options")
    _add_texts(eagle3)
    _add_training(eagle3)
    _add_head(eagle3)
    return parser


def _add_texts(parser: argparse.ArgumentParser) -> None:
    texts = parser.add_argument_group("texts")
    chosen = texts.add_mutually_exclusive_group()
    _add(chosen, "field", metavar="NAME", what="field of a record's prompt")
    chosen.add_argument(
        "--template",
        metavar="TEXT",
        help=r"makes the prompt of several fields, as in 'Question: {question}\nAnswer:' (\n: newline, \t: tab)",
    )
    texts.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    _add(texts, "held_out", type=int, metavar="N", what="the last N prompts are measured with, not trained on")
    _add(texts, "max_new_tokens", type=int, metavar="N", what="the longest continuation")
    _add(texts, "temperature", type=float, metavar="T", what="of the continuations; 0 is greedy")
    _add(texts, "batch_size", type=int, metavar="N", what="texts that are decoded together")


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--learn-prompts", action="store_true", help="learn from the prompts as well")
    _add(training, "epochs", type=int, metavar="N", what="passes over the texts")
    _add(training, "rows", type=int, metavar="N", what="texts of a step")
    _add(training, "lr", type=float, metavar="RATE", what="learning rate at its highest")
    _add(training, "seed", type=int, metavar="N", what="of everything that is drawn")
    _add(training, "depth", type=int, metavar="N", what="tokens of a draft that the head is trained for")
    _add(training, "save_every", type=int, metavar="N", what="steps between two checkpoints")
    _add(training, "model_dtype", metavar="DTYPE", what="of the target; float32 is the fastest on many CPUs")
    _add(training, "device", metavar="DEVICE", what="cpu, cuda, or auto")


def _add_head(parser: argparse.ArgumentParser) -> None:
    head = parser.add_argument_group("the head", "Sizes that are not given are those of the target.")
    head.add_argument(
        "--hidden-layers",
        metavar="A,B,C",
        help="hidden states that it reads: 0 is what the target's first layer gets, K what layer K gives "
        "(default: 2, the middle, the last but three; in a shallow target 1, the middle, the last)",
    )
    _add(head, "num_layers", type=int, metavar="N", what="decoder layers")
    head.add_argument("--intermediate-size", type=int, metavar="N", help="width of its MLP")
    head.add_argument("--num-heads", type=int, metavar="N", help="attention heads")
    head.add_argument("--num-kv-heads", type=int, metavar="N", help="heads of keys and values (default: all)")
    head.add_argument("--draft-vocab-size", type=int, metavar="N", help="draft the N most frequent tokens only")
    head.add_argument(
        "--share-lm-head", action="store_true", help="use the target's vocabulary projection, and save none"
    )
    head.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the saved weights")


def _add(group: argparse._ActionsContainer, name: str, *, what: str, **options: object) -> None:
    """Add an option with the default of `TrainOptions`."""
    default = TrainOptions.__dataclass_fields__[name].default
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, default=default, help=f"{what} (default: {default})", **options)  # type: ignore[arg-type]


@steady("emssd-train")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    try:
        with exit_on_error("emssd-train"):
            parsed = vars(make_parser().parse_args(arguments))
            del parsed["kind"]
            _run(TrainOptions(**parsed | {"hidden_layers": _layers(parsed["hidden_layers"])}))
    except KeyboardInterrupt:
        print("emssd-train: interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _run(options: TrainOptions) -> None:
    from emssd_train.job import run

    acceptance = run(options, plain_console(stderr=True))
    if acceptance is not None:
        plain_console().print(acceptance.table())
    print(f"{options.output}: use it with drafter=eagle3 drafter.path={options.output}")


def _layers(said: str | None) -> tuple[int, ...] | None:
    if said is None:
        return None
    try:
        return tuple(int(number) for number in said.split(","))
    except ValueError:
        raise ConfigError(f"--hidden-layers is {said!r}; give whole numbers, as in 2,6,9") from None


if __name__ == "__main__":
    main()
