"""Stop strings, chat templates and limits per prompt on the command line; the live figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from emssd import Engine
from emssd.cli import progress
from emssd.cli.progress import Bar
from emssd.model import ModelOptions, load_model
from emssd.sequences import StopStrings
from tests.support.tiers import looped


@pytest.fixture
def chat(decode_records: Callable, chat_model: str) -> Callable[..., Any]:
    """``chat(prompt, *arguments)`` decodes a few tokens for it."""
    options = (f"model.path={chat_model}", "data.chat=true", "max_new_tokens=3", "overwrite=true")
    return lambda prompt, *arguments: decode_records([{"prompt": prompt}], *options, *arguments)


def tokens_after(model: str, text: str) -> list[int]:
    """The model's text after `text`, whose ``<s>`` is the BOS token and no text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = Engine.from_pretrained(model, drafter="none")
    (generation,) = engine.generate([tokenizer(text, add_special_tokens=False)["input_ids"]], 3)
    return list(generation.token_ids)


def test_a_file_stands_in_for_a_chat_template(chat: Callable, chat_model: str, model: str, work: Path) -> None:
    """Also for a model that has none. Rows of another text of the file are not kept."""
    (work / "c.jinja").write_text("<s>{% for each in messages %}({{ each.content }}){% endfor %}")
    for path in (chat_model, model):
        (row,) = chat("hi", "chat_template=c.jinja", f"model.path={path}").rows
        assert row["token_ids"] == tokens_after(path, "<s>(hi)")
    (work / "c.jinja").write_text("{{ messages[0].content }}")
    again = ("chat_template=c.jinja", f"model.path={model}", "overwrite=false", "resume=true")
    assert chat("hi", *again).sentence.startswith(
        "resume=true: the row 'f.jsonl:1' in out was made with another limit, "
    )
    assert chat("hi", "chat_template=no").sentence.startswith("chat_template=no: no such file (looked in ")


CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ASK = {"role": "user", "content": "he"}


@looped(
    "prompt, arguments, text",
    [
        ("hi", [], "<s>[u]hi[a]"),
        ("hi", ["data.system='Be good'"], "<s>[s]Be good[u]hi[a]"),
        ([*CONVERSATION, ASK], [], "<s>[u]hi[a]ho[u]he[a]"),
        ([*CONVERSATION, ASK], ["data.system=ok"], "<s>[s]ok[u]hi[a]ho[u]he[a]"),
        ([{"role": "system", "content": "mine"}, ASK], ["data.system=ok"], "<s>[s]mine[u]he[a]"),
        ("hi", ["data.template='Q: {prompt}'"], "<s>[u]Q: hi[a]"),
    ],
    at_a_time=2,
)
def test_prompts_go_through_the_chat_template(
    prompt: Any, arguments: list[str], text: str, chat: Callable, chat_model: str
) -> None:
    (row,) = chat(prompt, *arguments).rows
    assert row["num_prompt_tokens"] == len(text) - len("<s>") + 1
    assert row["token_ids"] == tokens_after(chat_model, text)
    assert row["prompt"] == ("Q: hi" if "Q" in text else prompt)


def test_stop_strings_end_rows(decode: Callable) -> None:
    """The tiny model's tokens are bytes, so that any piece of its text can be one."""
    full = {row["id"]: row for row in decode("ignore_eos=true").rows}
    string = next(part for row in full.values() if (part := row["text"][4:6]).isascii() and part.isalpha())
    result = decode("ignore_eos=true", f"stop=['{string}',never]", "check=greedy")
    assert result.metrics["check"]["exact"] == 5
    for row in result.rows:
        whole = full[row["id"]]
        if row["finish_reason"] == "stop":
            assert row["token_ids"] == whole["token_ids"][: len(row["token_ids"])]
            assert row["text"] + string == whole["text"][: len(row["text"]) + 2]
            assert string not in row["text"]
        else:
            assert (row["token_ids"], string in whole["text"]) == (whole["token_ids"], False)
    assert "stop" in {row["finish_reason"] for row in result.rows}


@looped(
    "option, strings",
    [
        (r'stop=["\n\n","Question:"]', ["\n\n", "Question:"]),
        (r"stop=['\t\r','\\n','\d']", ["\t\r", "\\n", "\\d"]),
        ('stop=["\n"]', ["\n"]),
        ('stop=["</s>", "é"]', ["</s>", "é"]),
    ],
    at_a_time=2,
)
def test_stop_strings_as_they_are_typed(
    option: str, strings: list[str], decode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from emssd.cli import intake

    made: list[list[str]] = []
    real = intake.StopStrings

    def remember(strings: Iterable[str], tokenizer: Any) -> StopStrings:
        made.append(list(strings))
        return real(made[-1], tokenizer)

    monkeypatch.setattr(intake, "StopStrings", remember)
    assert decode(option, "max_new_tokens=2").status == 0
    assert made == [strings]


def figures(monkeypatch: pytest.MonkeyPatch, steps: list[float], *, terminal: bool, total: int, done: int) -> str:
    """The figures shown when the rows take `steps` seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, get_time=lambda: now[0])
    with Bar(console, "decoding", total, done=done) as live:
        for number, seconds in enumerate(steps, start=done + 1):
            now[0] += seconds
            live.tell(number, "0 tokens/s, τ 0.00")
        live._progress.refresh()
    return out.getvalue()


def test_the_time_left_counts_the_rows_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows in 80 s, each longer than the half minute after which rich forgets; six are left."""
    shown = figures(monkeypatch, [40.0, 40.0], terminal=True, total=12, done=4)
    assert "6/12" in shown
    assert "0:04:00 left" in shown


def test_rows_under_way_count_as_half_done_and_a_total_that_comes_late_starts_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Bar(Console(file=out, width=120), "training", 1, batch=8) as live:
        for done in (1, 2, 3):
            now[0] += 1000.0 if done == 1 else 60.0
            live.tell(done, total=32)
    assert [line.strip() for line in out.getvalue().splitlines()[:3]] == [
        "training 1/32", "training 2/32, 0:05:12 left", "training 3/32, 0:08:20 left"
    ]  # fmt: skip


def test_a_log_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = figures(monkeypatch, [25.0] * 7, terminal=False, total=12, done=4)
    lines = [line.strip() for line in shown.splitlines() if line.startswith("decoding ")]
    assert lines[:2] == [
        "decoding 7/12, 0 tokens/s, τ 0.00, 0:02:05 left",
        "decoding 10/12, 0 tokens/s, τ 0.00, 0:00:50 left",
    ]
    assert "11/12" in lines[2]
    assert len(lines) == 3


@pytest.mark.parametrize("soon", [0.0, 100.0])
def test_a_bar_tells_how_far_a_model_has_loaded_unless_that_is_soon_done(
    soon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SOON", soon)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress.loading_shown(console):
        load_model(ModelOptions("demo", compile=False))
    assert ("loading" in console.file.getvalue()) == (soon == 0)  # type: ignore[attr-defined]  # a StringIO
