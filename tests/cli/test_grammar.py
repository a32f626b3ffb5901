"""Structured output from the command line, from records and from OpenAI's batch files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd.cli.config import RunConfig, SamplingConfig
from emssd.cli.resume import _request_digest
from emssd.data.prompts import Prompt
from emssd.integrations.openai_batch import OpenAIBatchConfig, emssd_prompt_sources
from emssd.sampling import SamplingParams

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'emssd[grammar]'")


def test_response_formats_of_a_batch_are_grammars(tmp_path: Path) -> None:
    forms = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}]
    forms += [{"type": "text"}, {"type": "json_schema"}]
    lines = [
        {"custom_id": str(row), "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {"messages": [{"role": "user", "content": "x"}], "response_format": form}}
        for row, form in enumerate(forms)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third, wrong = emssd_prompt_sources()[0].build(OpenAIBatchConfig(path=str(path)))
    grammars = [(prompt.sampling or {}).get("grammar") for prompt in (first, second, third)]
    assert grammars == ["json", {"type": "null"}, None]
    assert "response_format is" in wrong.error


def test_a_job_is_resumed_with_the_same_grammar_only(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    config = RunConfig(sampling=SamplingConfig(grammar=str(schema)))
    before = _request_digest(config, Prompt("0", "x"))
    assert before == _request_digest(config, Prompt("0", "x"))
    schema.write_text('{"type": "integer"}')
    assert before != _request_digest(config, Prompt("0", "x"))
    plain = RunConfig(sampling=SamplingConfig())
    assert _request_digest(plain, Prompt("0", "x")) == _request_digest(plain, Prompt("0", "x", sampling={}))


def test_a_file_holds_a_schema_or_a_lark_grammar(tmp_path: Path) -> None:
    (tmp_path / "list.lark").write_text('start: "a"')
    grammar = SamplingParams(grammar=str(tmp_path / "list.lark")).grammar
    assert grammar == SamplingParams(grammar='lark:start: "a"').grammar


def test_the_command_line_gives_valid_rows_equal_to_those_without_drafts(decode: Callable) -> None:
    """The expression is taken as it stands, and `check=plain` decodes without forced tokens."""
    result = decode("sampling.grammar=regex:(yes|no): [0-9]{2}, a", "check=plain")
    assert result.metrics["check"]["exact"] == 5
    assert result.metrics["mean_acceptance_length"] > 1.5
    assert result.metrics["greedy"]["mean_acceptance_length"] == 1
    for row in result.rows:
        assert re.fullmatch(r"(yes|no): [0-9]{2}, a", row["text"]), row
        assert row["finish_reason"] == "eos"


def test_options_turn_forced_tokens_off_and_let_the_end_follow_to_the_limit(decode: Callable) -> None:
    options = ("sampling.grammar=regex:(yes|no): [0-9]{2}, a", "drafter=none", "max_new_tokens=16")
    figures = list[tuple[float, set[str], list[str]]]()
    for more in ("force_tokens=true", "force_tokens=false", "ignore_eos=true"):
        result = decode(*options, more)
        rows = sorted(result.rows, key=lambda row: str(row["id"]))
        reasons, texts = {row["finish_reason"] for row in rows}, [row["text"] for row in rows]
        figures.append((result.metrics["mean_acceptance_length"], reasons, texts))
    assert figures[0][0] > 1 == figures[1][0]
    assert [reasons for _, reasons, _ in figures] == [{"eos"}, {"eos"}, {"length"}]
    assert figures[0][2] == figures[1][2] == figures[2][2]


def test_a_grammar_that_cannot_be_is_refused_in_a_sentence(decode: Callable) -> None:
    assert "sampling.grammar: llguidance cannot follow" in decode("sampling.grammar=regex:(a").sentence
    assert "sampling.grammar is 'no grammar'" in decode("sampling.grammar=no grammar").sentence


def test_a_prompt_whose_grammar_cannot_be_is_skipped(decode_records: Callable) -> None:
    """Also one that is found out only in the middle of its output, of which no row is left."""
    grammars = ["regex:[0-9]", {"type": "array", "uniqueItems": True}, {"$ref": "#"}, "lark:start: /[0-9]/ <[2]>"]
    records = [{"prompt": "ab", "how": {"grammar": grammar}} for grammar in grammars]
    records[-1]["how"] |= {"temperature": 1, "n": 2}
    result = decode_records(records, "data.sampling_field=how", "on_error=skip", "max_new_tokens=24", "check=plain")
    (row,), errors = result.rows, list(result.errors.values())
    assert re.fullmatch("[0-9]", row["text"])
    assert all(map(str.__contains__, errors, ("uniqueItems", "no output can begin", "is its alphabet"))), errors
    assert result.metrics["num_failed_prompts"] == len(errors) == 3
    assert result.metrics["check"]["exact"] == 1
    failed = decode_records(records[-1:], "data.sampling_field=how", "overwrite=true")
    assert failed.sentence.startswith("prompt f.jsonl:1: no token of the model can go on with an output of the grammar")
