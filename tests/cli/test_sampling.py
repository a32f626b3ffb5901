"""Sampling from the command line: the same text whatever drafts, per prompt, and refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import looped

SAMPLED = ("sampling=sampled", "sampling.temperature=0.8", "sampling.seed=7", "max_new_tokens=16")


def texts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["id"]: (row["text"], row["token_ids"], row.get("seed")) for row in rows}


def test_residual_rows_are_tested_for_their_law_and_others_compared(
    emssd: Callable, model: str, records: Callable, decode: Callable
) -> None:
    path = records({"method": "residual"}, {"method": "residual", "seed": 1}, None)
    options = [f"model.path={model}", "data=jsonl", f"data.path={path}", "data.sampling_field=how", "max_new_tokens=30"]
    options += ["sampling=sampled", "output_dir=out", "overwrite=true", "ignore_eos=true", "drafter=llma"]
    result = emssd(*options, "check=plain")
    check = result.metrics["check"]
    assert (check["exact"], check["ties"], check["differences"]) == (1, 0, 0)
    assert check["law"]["num_tokens"] == 60
    assert check["law"]["right"]
    assert "check=plain: 60 tokens have the law of plain decoding, p = " in result.out
    assert "check=plain: 1 exact" in result.out
    alone = decode(*SAMPLED, "sampling.method=residual", "check=plain").out
    assert "the law of plain decoding" in alone
    assert "exact" not in alone


def test_residual_rows_with_another_law_are_said_to_have_it(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from emssd.decoding import choosing

    def same(*_: Any) -> Any:
        return lambda: 0.0

    monkeypatch.setattr(choosing, "uniforms", same)  # the most that 0.0 can mean is the first possible token
    result = decode(*SAMPLED, "sampling.method=residual", "sampling.temperature=5", "check=plain")
    assert not result.metrics["check"]["law"]["right"]
    assert "tokens DO NOT have the law of plain decoding" in result.out


@looped("name", ["greedy", "plain"])
def test_both_names_of_the_check_compare_greedy_rows(name: str, decode: Callable) -> None:
    result = decode("max_new_tokens=8", f"check={name}")
    assert f"check={name}: 5 exact" in result.out
    assert "plain greedy" in result.out


def test_a_sampled_difference_is_judged_by_what_was_compared(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from emssd.decoding import engine

    right = engine.verify

    def wrong(chosen, draft, *others):
        verified = right(chosen, draft, *others)
        if draft.indptr[-1]:  # only steps with a draft, so that plain sampling stays right
            verified[0].new_tokens[-1] = 5
        return verified

    monkeypatch.setattr(engine, "verify", wrong)
    check = decode(*SAMPLED, "budget=fixed", "check=plain").metrics["check"]
    assert check["differences"] > 0
    assert all(each["margin"] > each["tolerance"] for each in check["details"])


@pytest.fixture
def records(tmp_path: Path) -> Callable[[Any], str]:
    def write(*options: Any) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": "a b c", "how": each}) + "\n" for each in options))
        return str(path)

    return write


def test_prompts_have_options_of_their_own(emssd: Callable, model: str, records: Callable) -> None:
    hot = {"temperature": 0.9, "seed": 3}
    path = records(None, hot, {"seed": 4}, {"logit_bias": {"5": 100}, "temperature": 0.0})
    options = [f"model.path={model}", "data=jsonl", f"data.path={path}", "data.sampling_field=how", "max_new_tokens=6"]
    options += ["sampling=sampled", "sampling.seed=1", "output_dir=out", "overwrite=true", "ignore_eos=true"]
    rows = emssd(*options).rows
    assert [row.get("seed") for row in sorted(rows, key=lambda row: row["id"])] == [1, 3, 4, None]
    assert next(row for row in rows if "seed" not in row)["token_ids"] == [5] * 6
    assert texts(emssd(*options, "drafter=pld", "batch_size=1").rows) == texts(rows)


@looped(
    "how, message",
    [
        ({"temperature": -1}, "prompt prompts.jsonl:1: sampling.temperature is -1; it must be 0 or at least 1e-06"),
        (
            {"top_q": 0.5},
            "prompt prompts.jsonl:1: sampling.top_q is no option; did you mean 'top_p'? The options are",
        ),
        ({"method": "residul"}, "sampling.method is 'residul'; did you mean 'residual'? choose coupled or residual"),
        ({"logit_bias": {"a": 1}}, "prompt prompts.jsonl:1: sampling.logit_bias has a token id 'a'; it must be"),
        ({"logit_bias": {"100000": 1}}, "logit_bias has token 100000, but the model's vocabulary has"),
        (0.5, "prompts.jsonl:1: field 'how' holds a value of type float; options of sampling are an object, such as"),
    ],
    at_a_time=3,
)
def test_options_of_a_prompt_that_cannot_be_are_refused(
    how: Any, message: str, emssd: Callable, model: str, records: Callable
) -> None:
    result = emssd(f"model.path={model}", "data=jsonl", f"data.path={records(how)}", "data.sampling_field=how")
    assert message in result.sentence
