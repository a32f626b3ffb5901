"""``emssd-rest``: makes datastores for `drafter=rest`, and tells what is in them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from emssd.cli.terminal import steady
from emssd.data import encode_text, read_texts
from emssd.errors import ConfigError, PromptError

__all__ = ["main"]

_T = TypeVar("_T")


def make_parser() -> argparse.ArgumentParser:
    """The command line; what it parses has an ``action`` to call with the result."""
    parser = argparse.ArgumentParser(
        prog="emssd-rest", description="Makes datastores for drafter=rest, and tells what is in them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="make a store from a corpus", description="Make a store from a corpus.")
    build.set_defaults(action=_build)
    build.add_argument(
        "corpus", nargs="+", metavar="CORPUS", help=".jsonl: a document per line; any other file is one document"
    )
    build.add_argument("store", metavar="STORE", help="folder to make")
    build.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="the target's folder or hub id, or demo; must be its own"
    )
    text = build.add_mutually_exclusive_group()
    text.add_argument("--field", default="text", metavar="NAME", help="field of a record's text (default: text)")
    text.add_argument(
        "--template",
        metavar="TEXT",
        help=r"makes the text of several fields, as in 'Question: {question}\nAnswer:' (\n: newline, \t: tab)",
    )
    build.add_argument("--limit", type=int, metavar="N", help="use the first N records of each .jsonl file")
    info = commands.add_parser("info", help="what a store is made of", description="Tell what a store is made of.")
    info.set_defaults(action=_info)
    info.add_argument("store", metavar="STORE", help="its folder")
    return parser


@steady("emssd-rest", if_interrupted="no store was made")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    parsed = make_parser().parse_args(arguments)
    parsed.action(parsed)


def _build(arguments: argparse.Namespace) -> None:
    from transformers.utils import logging

    from emssd_rest.build import build_store

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit is {arguments.limit}; it must be at least 1")
    # Transformers warns of texts that are longer than the model takes; these are never the model's input.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # Transformers' own has no annotations
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        texts = read_corpus(arguments.corpus, field=arguments.field, template=arguments.template, limit=arguments.limit)
        documents = (encode_text(text, tokenizer, name) for name, text in _with_progress(texts))
        sources = [Path(name).name for name in arguments.corpus]
        header = build_store(arguments.store, documents, tokenizer=tokenizer, sources=sources)
    finally:
        logging.set_verbosity(verbosity)
    print(
        f"{arguments.store}: {header.num_documents} documents, {header.num_tokens} tokens. "
        f"Use it with drafter=rest drafter.store={arguments.store}"
    )


def _info(arguments: argparse.Namespace) -> None:
    from emssd_rest.store import Store

    store = Store.open(arguments.store)
    header = store.header
    print(f"documents  {header.num_documents}")
    print(f"tokens     {header.num_tokens}, ids up to {header.num_ids - 1}")
    print(
        f"tokenizer  {header.vocab_size} tokens, {header.tokenizer[:12]}" if header.tokenizer else "tokenizer  unknown"
    )
    print(f"sources    {', '.join(header.sources) or 'unknown'}")
    print(f"size       {store.tokens.nbytes + store.suffixes.nbytes} bytes")


def read_corpus(names: Iterable[str], **options: Any) -> list[tuple[str, str]]:
    """`read_texts` of ``field``, ``template`` and ``limit``; errors name the options of this command."""
    try:
        return read_texts(names, **options)
    except PromptError as error:
        message = str(error).partition("; data.chat=")[0]  # documents are no conversations
        raise PromptError(re.sub(r"\bdata\.(field|template)\b(?!\.)", r"--\1", message)) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder or hub id, or of ``demo``. Raises ConfigError: there is none."""
    from emssd.model import load_tokenizer as load

    try:
        return load(name)
    except ConfigError as error:
        raise ConfigError(f"--tokenizer {name}: {error}") from error


def _with_progress(texts: list[_T]) -> Iterator[_T]:
    """`texts`, with a bar on a terminal; then the next step is named, as the library that sorts says nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:  # where a bar that is disabled writes an empty line, with an older Rich
        yield from texts
        return
    yield from track(texts, "encoding", console=console, transient=True)
    console.print("sorting", highlight=False)


if __name__ == "__main__":
    main()
