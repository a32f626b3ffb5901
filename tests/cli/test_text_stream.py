"""The text of a row on a terminal: what is printed stays, and is in the end the text of the row."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from emssd.cli.console import harmless
from emssd.cli.text_stream import TerminalStream
from emssd.sequences import Generation, Request, Row, StopStrings
from tests.sequences.test_stopping import BYTE_LEVEL, SENTENCEPIECE
from tests.support.tiers import looped

PIECES = ["ab", " a", "b", "é€", "😀", "\n", "</s>", "\N{REPLACEMENT CHARACTER}", "aba", "  "]


@looped("seed", range(60))
def test_what_is_printed_is_never_cut_and_in_the_end_all(seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = (BYTE_LEVEL, SENTENCEPIECE)[seed % 2]
    ids = tokenizer("".join(draw.choices(PIECES, k=12)), add_special_tokens=False)["input_ids"]
    ids += draw.sample(range(3, len(tokenizer)), 4)  # bytes that are no character
    stop = StopStrings([draw.choice(["b", "aba", "a\n", "é", "b</s>", "😀ab"])], tokenizer) if seed % 3 else None
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, markup=False, emoji=False, width=9)
    stream = TerminalStream(console, tokenizer, stop)
    row, printed = Row(Request("0", (5,), len(ids), stop=stop)), list[str]()
    while row.finish_reason is None:
        index = len(row.output_ids)
        new, num_accepted = ids[index : index + draw.randrange(1, 4)], draw.randrange(3)
        tokens, reason = row.taken(new)
        row.advance(tokens, reason, 3, min(num_accepted, len(new) - 1))
        stream(row)
        printed.append(_without_colours(file))
    done = Generation.of(row, tokenizer)
    text = harmless(done.text or "")
    assert all(text.startswith(shown) for shown in printed), (text, printed)
    stream.end(done.text or "")
    assert _without_colours(file).removesuffix("green: drafted and accepted\n") == text + "\n"


def _without_colours(file: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


@looped(
    "colours, text", [({}, "\x1b[32mc\x1b[0m\x1b[32md\x1b[0me"), ({"NO_COLOR": "1"}, "cde"), ({"TERM": "dumb"}, "cde")]
)
def test_what_was_drafted_is_coloured_and_told(
    colours: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in colours.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    stream = TerminalStream(Console(file=file, force_terminal=True), BYTE_LEVEL, None)
    row = Row(Request("0", (5,), 9))
    for new, num_accepted in (("ab", 0), ("cde", 2)):
        row.advance(BYTE_LEVEL.convert_tokens_to_ids(list(new)), None, 2, num_accepted)
        stream(row)
    stream.end("abcde")
    monkeypatch.undo()
    assert text in file.getvalue()
    assert ("drafted and accepted" in file.getvalue()) == (not colours)


def test_a_prompt_streams_to_a_terminal(emssd: Callable, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (f"model.path={model}", "prompt=abc abc", "max_new_tokens=12", "overwrite=true", "output_dir=out")
    piped = emssd(*options)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    steps = emssd(*options)
    assert _without_colours(io.StringIO(steps.out)).startswith(piped.out.partition("written")[0].rstrip("\n"))
    assert steps.rows == piped.rows
