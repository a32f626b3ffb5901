"""``emssd-train``: trains a drafter for a target on the target's own texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from emssd.errors import ConfigError
from emssd.errors.terminal import plain_console, steady
from emssd_train.options import Eagle3Options, MedusaOptions, PardOptions, TrainOptions

__all__ = ["main", "make_parser"]

_DESCRIPTION = """\
Train {what} for a target. The target continues each prompt of a file. {learns} Then prompts that it has not seen are
decoded with what was trained, to see what is accepted. {saved}. Draft with drafter={kind} drafter.path=DIR.
"""


class _Parser(NamedTuple):
    """The command that trains one kind of drafter.

    Attributes:
        options: what is parsed has their fields.
        what: is trained.
        learns, saved: sentences of its description.
        depth: help of ``--depth``.
        add: adds the options that other kinds do not have.
    """

    options: type[TrainOptions]
    what: str
    learns: str
    saved: str
    depth: str
    add: Callable[[argparse.ArgumentParser, type[TrainOptions]], None]


def make_parser() -> argparse.ArgumentParser:
    """The command line. What it parses has the fields of the options of a kind, and these as ``options``."""
    parser = argparse.ArgumentParser(
        prog="emssd-train", description="Trains a drafter for a target on the target's own texts."
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for each in _PARSERS:
        kind = each.options.kind
        description = _DESCRIPTION.format(what=each.what, learns=each.learns, saved=each.saved, kind=kind)
        one = kinds.add_parser(kind, help=f"train {each.what}", description=description, allow_abbrev=False)
        one.set_defaults(options=each.options)
        one.add_argument("--model", required=True, metavar="MODEL", help="the target's folder or hub id, or demo")
        one.add_argument("--data", required=True, metavar="FILE", help=".jsonl with a prompt per line")
        one.add_argument("--output", required=True, metavar="DIR", help="folder to make")
        one.add_argument("--resume", action="store_true", help="go on with DIR, with the same options")
        _add_texts(one, each.options)
        _add_training(one, each.options, each.depth)
        each.add(one, each.options)
    return parser


def _add_texts(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    texts = parser.add_argument_group("texts")
    chosen = texts.add_mutually_exclusive_group()
    _add(chosen, options, "field", metavar="NAME", what="field of a record's prompt")
    chosen.add_argument(
        "--template",
        metavar="TEXT",
        help=r"makes the prompt of several fields, as in 'Question: {question}\nAnswer:' (\n: newline, \t: tab)",
    )
    texts.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    _add(texts, options, "held_out", type=int, metavar="N", what="the last N prompts are measured with, not trained on")
    _add(texts, options, "max_new_tokens", type=int, metavar="N", what="the longest continuation")
    _add(texts, options, "temperature", type=float, metavar="T", what="of the continuations; 0 is greedy")
    _add(texts, options, "batch_size", type=int, metavar="N", what="texts that are decoded together")


def _add_training(parser: argparse.ArgumentParser, options: type[TrainOptions], depth: str) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--learn-prompts", action="store_true", help="learn from the prompts as well")
    _add(training, options, "epochs", type=int, metavar="N", what="passes over the texts")
    _add(training, options, "rows", type=int, metavar="N", what="texts of a step")
    _add(training, options, "lr", type=float, metavar="RATE", what="learning rate at its highest")
    _add(training, options, "seed", type=int, metavar="N", what="of everything that is drawn")
    _add(training, options, "depth", type=int, metavar="N", what=depth)
    _add(training, options, "save_every", type=int, metavar="N", what="steps between two checkpoints")
    _add(training, options, "model_dtype", metavar="DTYPE", what="of the target; float32 is the fastest on many CPUs")
    _add(training, options, "device", metavar="DEVICE", what="cpu, cuda, or auto")
    training.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the saved weights")


def _add_eagle3(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    head = parser.add_argument_group("the head", "Sizes that are not given are those of the target.")
    head.add_argument(
        "--hidden-layers",
        action=_Layers,
        metavar="A,B,C",
        help="hidden states that it reads: 0 is what the target's first layer gets, K what layer K gives "
        "(default: 2, the middle, the last but three; in a shallow target 1, the middle, the last)",
    )
    _add(head, options, "num_layers", type=int, metavar="N", what="decoder layers")
    head.add_argument("--intermediate-size", type=int, metavar="N", help="width of its MLP")
    head.add_argument("--num-heads", type=int, metavar="N", help="attention heads")
    head.add_argument("--num-kv-heads", type=int, metavar="N", help="heads of keys and values (default: all)")
    _add_draft_vocab(head)
    head.add_argument(
        "--share-lm-head", action="store_true", help="use the target's vocabulary projection, and save none"
    )


def _add_medusa(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    heads = parser.add_argument_group("the heads", "Each has a vocabulary projection of its own.")
    _add(heads, options, "num_layers", type=int, metavar="N", what="residual layers of each head")
    _add_draft_vocab(heads)


def _add_pard(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--draft",
        required=True,
        metavar="MODEL",
        help="a small language model to begin with, by folder or hub id; it has the target's tokenizer",
    )


def _add_draft_vocab(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--draft-vocab-size", type=int, metavar="N", help="draft the N most frequent tokens only")


def _add(
    group: argparse._ActionsContainer, options: type[TrainOptions], name: str, *, what: str, **more: object
) -> None:
    default = options.__dataclass_fields__[name].default
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, default=default, help=f"{what} (default: {default})", **more)  # type: ignore[arg-type]


class _Layers(argparse.Action):
    def __call__(self, parser: object, into: argparse.Namespace, said: object, flag: str | None = None) -> None:
        try:
            into.hidden_layers = tuple(int(number) for number in str(said).split(","))
        except ValueError:
            raise ConfigError(f"{flag} is {said!r}; give whole numbers, as in 2,6,9") from None


_PARSERS = (
    _Parser(
        Eagle3Options,
        what="an EAGLE-3 head",
        learns="The head learns from these texts, and from what the target computes as it reads them.",
        saved="The head is saved in a container of speculators",
        depth="tokens of a draft that the head is trained for",
        add=_add_eagle3,
    ),
    _Parser(
        MedusaOptions,
        what="Medusa heads",
        learns="The heads learn from these texts, and from what the target computes as it reads them.",
        saved="The heads are saved in the format of vLLM",
        depth="heads, one for each token of a draft",
        add=_add_medusa,
    ),
    _Parser(
        PardOptions,
        what="a PARD model",
        learns="A small language model learns from these texts to fill in masks, a whole draft in one pass.",
        saved="The model is saved as a model of Transformers",
        depth="tokens of a draft; all but the first are masks",
        add=_add_pard,
    ),
)


@steady("emssd-train", if_interrupted="--resume goes on from the last checkpoint")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    parsed = vars(make_parser().parse_args(arguments))
    _run(parsed.pop("options")(**parsed))


def _run(options: TrainOptions) -> None:
    from emssd_train.job import run

    acceptance = run(options, plain_console(stderr=True))
    if acceptance is not None:
        plain_console().print(acceptance.table())
    print(f"{options.output}: use it with drafter={options.kind} drafter.path={options.output}")


if __name__ == "__main__":
    main()
