"""The messages between a runner and `cpu_peers.py`: one JSON request per line on stdin, one JSON answer on stdout.

A runner is started by its engine's own interpreter, so nothing here needs more than Python. Its first line says that
the model is loaded and which versions it uses; each answer after it holds the seconds of one run over all prompts and
the tokens of every row up to and including EOS. The real stdout carries nothing else: what libraries print goes to
stderr.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COPIED", "DRAFTED", "MATCHED", "MODES", "Request", "options_of", "serve"]

MODES = ("greedy", "ngram", "draft_model")

# One speculation for all engines: n-grams of MATCHED tokens, the COPIED tokens after them, DRAFTED tokens of a model.
MATCHED, COPIED, DRAFTED = 2, 7, 4

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]


@dataclass(frozen=True)
class Request:
    """One run over all prompts.

    Attributes:
        mode: one of `MODES`.
        batch_size: rows that the engine may decode at a time.
        max_new_tokens: EOS included.
        prompts: token ids of each row.
        eos: the tokens that end a row.
        warm_up: how many of the prompts are decoded once before the clock starts.
    """

    mode: str
    batch_size: int
    max_new_tokens: int
    prompts: Tokens
    eos: list[int]
    warm_up: int = 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest row, prompt and output together."""
        return max(map(len, self.prompts)) + self.max_new_tokens


@dataclass
class Engine:
    """An engine that a runner makes for a mode and a batch size.

    Attributes:
        generate: new tokens of each prompt, in the order of the prompts.
        details: what is worth noting of the last run.
    """

    generate: Generate
    details: Callable[[], dict[str, Any]] = field(default=dict)


Build = Callable[[Request], Engine]


def serve(load: Callable[[argparse.Namespace], Build], distributions: Sequence[str]) -> None:
    """Load the model, then answer requests until stdin ends.

    Args:
        load: makes, from the command line, the function that makes an engine for a request.
        distributions: whose versions are reported.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the process is killed when it is done with

    def answer(values: dict[str, Any]) -> None:
        out.write(json.dumps(values) + "\n")
        out.flush()

    try:
        build = load(_arguments())
        answer({"versions": _versions(distributions)})
        engines: dict[tuple[str, int], Engine] = {}
        for line in sys.stdin:
            request = Request(**json.loads(line))
            key = (request.mode, request.batch_size)
            if key not in engines:
                engines = {key: build(request)}  # the one before is dropped: two may not fit
            answer(_timed(engines[key], request))
    except Exception as error:  # whatever it is, the other side is told
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def options_of(words: list[str], defaults: dict[str, str]) -> dict[str, str]:
    """The ``NAME=VALUE`` of a command line over the values of `known`.

    Raises:
        ValueError: a name that is not known.
    """
    pairs = dict(option.partition("=")[::2] for option in words)
    if unknown := sorted(pairs.keys() - defaults):
        raise ValueError(f"unknown option {unknown[0]!r}; this runner has {', '.join(defaults) or 'none'}")
    return defaults | pairs


def _versions(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of those installed. An engine may come under one of several names."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _timed(engine: Engine, request: Request) -> dict[str, Any]:
    if request.warm_up:
        engine.generate(request.prompts[: request.warm_up], request.max_new_tokens)
    start = time.perf_counter()
    rows = engine.generate(request.prompts, request.max_new_tokens)
    seconds = time.perf_counter() - start
    if len(rows) != len(request.prompts):
        raise RuntimeError(f"{len(rows)} rows came back for {len(request.prompts)} prompts")
    return {"seconds": seconds, "tokens": [_cut(row, request.eos) for row in rows], "details": engine.details()}


def _cut(row: list[int], eos: list[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
    return row[:end]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args()
