"""Prompts that fail: each for its own reason, named with the place, and without stopping the rest if one may skip."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emssd.cli.config import OnError
from emssd.cli.intake import Failures
from emssd.data.prompts import Prompt
from emssd.errors import PromptError

BAD: list[tuple[str, str, str]] = [
    ("{oops", "f.jsonl:2", "f.jsonl:2 is not JSON: "),
    ("[]", "f.jsonl:2", "f.jsonl:2 is a list; "),
    ("\ufffe", "f.jsonl:2", "f.jsonl:2 is not UTF-8 text (invalid start byte at byte 12); convert it"),
    ('{"id": "bad", "n": 3}', "f.jsonl:2", "f.jsonl:2 has no field 'prompt'; it has 'id', 'n'. Choose with data.field"),
    ('{"prompt": "a", "n": 3}', "f.jsonl:2", "f.jsonl:2 has no field 'id'; it has 'prompt', 'n'. Choose with data.id_"),
    ('{"prompt": "a", "id": "bad"}', "f.jsonl:2", "f.jsonl:2 has no field 'n'; it has 'prompt', 'id'. Choose"),
    ('{"id": "bad", "n": 3, "prompt": ""}', "bad", "prompt bad is empty; there is nothing to continue"),
    ("[" * 5000, "f.jsonl:2", "f.jsonl:2 is JSON that cannot be read: its brackets are nested too deeply; repair"),
    ('{"id": null, "n": 3, "prompt": "a"}', "f.jsonl:2", "f.jsonl:2: field 'id' holds a value of type NoneType; an id"),
    ('{"id": "bad", "n": 1.5, "prompt": "a"}', "f.jsonl:2", "f.jsonl:2: field 'n' holds 1.5; a limit of new tokens"),
    ('{"id": "bad", "n": 3, "prompt": 3}', "f.jsonl:2", "f.jsonl:2: field 'prompt' holds a value of type int"),
    ('{"id": "bad", "n": 3, "prompt": "%s"}' % ("x" * 99), "bad", "prompt bad has 99 tokens, and the model takes 96"),
    ('{"id": "bad", "n": 3, "prompt": "\\ud800"}', "bad", "prompt bad is no Unicode text: character 1 is half of a"),
    ('{"id": "bad", "n": 0, "prompt": "a"}', "f.jsonl:2", "f.jsonl:2: field 'n' holds 0; a limit of new tokens is a"),
    ('{"id": "bad", "n": true, "prompt": "a"}', "f.jsonl:2", "f.jsonl:2: field 'n' holds True; a limit of new tokens"),
    ('{"id": "bad", "n": "9", "prompt": "a"}', "f.jsonl:2", "f.jsonl:2: field 'n' holds '9'; a limit of new tokens"),
    ('{"id": "first", "n": 3, "prompt": "a"}', "f.jsonl:2", "f.jsonl:2 has the id 'first' of f.jsonl:1; choose"),
]  # fmt: skip


OWN = ("data.id_field=id", "data.max_new_tokens_field=n")


@pytest.fixture
def records(decode_records: Callable) -> Callable[..., Any]:
    """``records(second, *arguments)`` decodes three records, of which the second is this line."""

    def run(second: str, *arguments: object) -> Any:
        lines = ['{"id": "first", "n": 3, "prompt": "hello"}', second, '{"id": "3", "n": null, "prompt": "x"}']
        return decode_records(lines, *OWN, "ignore_eos=true", *arguments)

    return run


def test_each_bad_prompt_is_skipped_for_its_own_reason(decode_records: Callable) -> None:
    lines, wanted = list[Any](['{"id": "first", "n": 3, "prompt": "hello"}']), dict[str, str]()
    for number, case in enumerate(BAD, start=2):
        line, name, reason = (re.sub(r"\bbad\b", f"bad{number}", text) for text in case)
        lines.append(b'{"prompt": "\xff"}' if line == "\ufffe" else line)
        wanted[name.replace("f.jsonl:2", f"f.jsonl:{number}")] = reason.replace("f.jsonl:2", f"f.jsonl:{number}")
    result = decode_records(lines, *OWN, "on_error=skip", "max_new_tokens=3")
    assert [row["id"] for row in result.rows] == ["first"]
    assert result.errors.keys() == wanted.keys()
    assert len(wanted) == len(BAD) == result.metrics["num_failed_prompts"]
    for name, reason in wanted.items():
        assert result.errors[name].startswith(reason), (name, result.errors[name])


def test_a_bad_prompt_fails_the_run_or_is_skipped(records: Callable) -> None:
    line, name, reason = BAD[6]
    failed = records(line)
    assert failed.sentence.startswith(reason)
    assert not failed.folder.exists()
    result = records(line, "on_error=skip", "check=greedy", "max_new_tokens=24")
    assert {row["id"]: len(row["token_ids"]) for row in result.rows} == {"first": 3, "3": 24}
    assert result.errors == {name: failed.sentence}
    assert result.metrics["check"]["exact"] == 2
    assert (result.metrics["num_prompts"], result.metrics["num_failed_prompts"]) == (2, 1)
    assert "1 prompts were skipped, see errors.jsonl:" in result.out
    assert reason.split(";")[0] in result.out
    assert "written to out/: generations.jsonl, metrics.json, config.yaml, errors.jsonl" in result.out


def test_two_prompts_of_one_id_from_any_source() -> None:
    source = [Prompt("a", "x"), Prompt("b", "y"), Prompt("a", "z")]
    with pytest.raises(PromptError, match="there are two prompts 'a'; ids tell rows apart, so give others"):
        Failures(OnError.fail).passed(source)
    skipping = Failures(OnError.skip)
    assert skipping.passed(source) == source[:2]
    assert [failed.prompt_id for failed in skipping.prompts] == ["a"]


def test_a_limit_beyond_all_models_and_what_no_option_reads_are_fine(records: Callable) -> None:
    assert len(records('{"id": "2", "n": 5.0, "prompt": "a"}').rows[1]["token_ids"]) == 5
    huge = '{"id": "\\ud800", "n": 1' + "0" * 40 + ', "prompt": "a", "score": NaN}'
    result = records(huge, "overwrite=true", "max_new_tokens=24")
    assert {row["id"]: len(row["token_ids"]) for row in result.rows} == {"first": 3, "\ud800": 95, "3": 24}
    assert "96 steps at most are too few to pay for it" in result.err  # no row is longer than the model takes


def test_a_prompt_that_the_kv_cache_cannot_hold(decode: Callable, prompts: Path) -> None:
    prompts.write_text(prompts.read_text() + "x" * 70 + "\n")
    result = decode("kv_memory=64KiB", "backend.kernels=torch", "on_error=skip")
    assert len(result.rows) == 5
    assert result.errors.keys() == {"prompts.txt:7"}
    assert "raise kv_memory, or lower max_new_tokens" in result.errors["prompts.txt:7"]


def test_if_all_prompts_fail_the_run_fails(decode_records: Callable) -> None:
    result = decode_records(['{"text": "a"}', "{oops", '{"prompt": ""}', "[]"], "on_error=skip")
    assert result.sentence == "none of the 4 prompts can be used; out/errors.jsonl says why"
    assert len(result.errors) == 4
    assert "… and 1 more" in result.err


def test_what_was_skipped_is_not_what_is_left_to_do(records: Callable) -> None:
    line = '{"id": "bad", "n": 3, "prompt": "%s"}' % ("x" * 99)
    before = records(line, "on_error=skip").files
    result = records(line, "on_error=skip", "resume=true")
    assert "nothing else is left to do" in result.err
    assert result.files == before
    (result.folder / "generations.jsonl").write_text(before["generations.jsonl"].splitlines(keepends=True)[0])
    metrics = records(line, "on_error=skip", "resume=true").metrics
    assert [metrics[f"num_{kind}prompts"] for kind in ("", "resumed_", "failed_")] == [2, 1, 1]
