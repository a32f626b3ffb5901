"""Sampling from the command line: the same text whatever drafts; several rows of a prompt; log-probabilities."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emssd.cli.output import OutputFolder
from emssd.data.prompts import Prompt
from emssd.sequences import FinishReason, Generation, TokenLogprob

from .conftest import RESUME

SAMPLED = ("sampling=sampled", "sampling.temperature=0.8", "sampling.seed=7", "max_new_tokens=12", "ignore_eos=true")


def texts(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    return {(row["id"], row.get("sample", 0)): row["token_ids"] for row in rows}


@pytest.fixture
def own(decode_records: Callable) -> Callable[..., Any]:
    """``own(options, *arguments)`` decodes prompts with these sampling options of their own."""

    def run(options: list[Any], *arguments: str) -> Any:
        records = [{"prompt": "a b c", "how": option} for option in options]
        return decode_records(records, "data.sampling_field=how", *SAMPLED, *arguments)

    return run


def test_residual_rows_are_tested_for_their_law_and_others_compared(own: Callable, decode: Callable) -> None:
    options = [{"method": "residual"}, {"method": "residual", "seed": 1}, None]
    result = own(options, "max_new_tokens=30", "drafter=llma", "check=plain")
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
    from emssd_residual import rules

    def same(*_: Any) -> Any:
        return lambda: 0.0

    monkeypatch.setattr(rules, "uniforms", same)  # the most that 0.0 can mean is the first possible token
    options = ("sampling.method=residual", "sampling.temperature=5", "max_new_tokens=30")
    result = decode(*SAMPLED, *options, "check=plain")
    assert not result.metrics["check"]["law"]["right"]
    assert "tokens DO NOT have the law of plain decoding" in result.out


def test_each_sample_is_a_row_with_its_seed_and_number(decode: Callable) -> None:
    three = (*SAMPLED, "data.limit=3")
    first = decode(*three, "sampling.n=3", "drafter=none", "batch_size=2")
    assert len(first.rows) == len(texts(first.rows)) == 9
    assert {(row["seed"], row["sample"]) for row in first.rows} == {(7, 0), (7, 1), (7, 2)}
    assert len({tuple(text) for text in texts(first.rows).values()}) > 6
    assert first.metrics["num_prompts"] == 9
    second = decode(*three, "sampling.n=3", "drafter=llma", "batch_size=8", "check=plain")
    assert texts(second.rows) == texts(first.rows)
    assert second.metrics["check"] == {"exact": 9, "ties": 0, "differences": 0, "details": []}
    alone = texts(decode(*three).rows)
    assert alone == {key: text for key, text in texts(first.rows).items() if key[1] == 0}


def test_a_difference_says_which_sample_it_is_in(decode: Callable, draft_wrongly: Callable) -> None:
    draft_wrongly()
    cold = ("sampling.temperature=0.05", "max_new_tokens=24", "budget=fixed", "data.limit=1")  # it repeats itself
    result = decode(*SAMPLED, *cold, "sampling.n=2", "check=plain")
    details = result.metrics["check"]["details"]
    assert {detail["sample"] for detail in details} == {0, 1}
    assert result.metrics["check"]["differences"] == len(details)
    assert all(detail["margin"] > detail["tolerance"] for detail in details)
    assert re.search(r"DIFFERENCE in prompts.txt:\d, sample 1, at new token \d+", result.out)


class TestResume:
    @pytest.fixture
    def job(self, decode: Callable) -> Callable[..., Any]:
        """``job(*arguments)`` goes on with the job in ``out``."""
        return lambda *arguments: decode(*SAMPLED, *RESUME, *arguments)

    def test_goes_on_with_the_samples_that_are_not_there(self, job: Callable) -> None:
        """They are drawn beside another drafter, in other batches, and no seed has moved on."""
        expected = texts(job("sampling.n=3", "batch_size=2").rows)
        path = Path("out/generations.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[2:9]) + lines[9][:30])
        path.with_name("metrics.json").unlink()
        again = job("sampling.n=3", "drafter=lookahead", "backend=padded", "batch_size=3")
        assert "out/ holds 7 of 15 rows" in again.err
        assert (again.metrics["num_prompts"], again.metrics["num_resumed_prompts"]) == (15, 7)
        assert texts(again.rows) == expected
        assert len(again.rows) == 15
        assert path.read_bytes().splitlines(keepends=True)[:7] == lines[2:9]
        assert "nothing is left to do" in job("sampling.n=3").err

    def test_adds_samples_and_takes_none_away(self, job: Callable) -> None:
        one = texts(job().rows)
        more = job("sampling.n=2")
        assert one.items() <= texts(more.rows).items()
        assert len(more.rows) == 10
        sentence = job().sentence
        assert "out holds sample 1 of 'prompts.txt:" in sentence
        assert sentence.endswith(
            "and n is 1 now; raise n to at least 2, or start again with overwrite=true or another output_dir"
        )
        assert (
            "were made with another value of sampling.logprobs" in job("sampling.n=2", "sampling.logprobs=1").sentence
        )

    def test_takes_a_sample_that_is_there_twice_for_a_mistake(self, job: Callable) -> None:
        job("sampling.n=2")
        path = Path("out/generations.jsonl")
        second = next(line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["sample"] == 1)
        path.write_text(path.read_text() + second)
        name = json.loads(second)["id"]
        assert f"is a second row with the id {name!r} and the sample 1, after line" in job("sampling.n=2").sentence


class TestLogprobs:
    def test_stand_in_the_rows_in_the_order_of_their_tokens(self, decode: Callable) -> None:
        rows = decode("sampling.logprobs=2", "max_new_tokens=8", "drafter=llma").rows
        for row in rows:
            assert [token["token_id"] for token in row["logprobs"]] == row["token_ids"]
            for token in row["logprobs"]:
                assert token["top"][0] == [token["token_id"], token["logprob"]], "greedy rows have the best token"
                assert 0 >= token["logprob"] > token["top"][1][1]
        without = decode("max_new_tokens=8").rows
        # Rows come as they end, which drafts change.
        assert {row["id"]: row["token_ids"] for row in rows} == {row["id"]: row["token_ids"] for row in without}
        assert not any("logprobs" in row for row in without)
        bare = decode("sampling.logprobs=0", "max_new_tokens=2").rows
        assert all(token["top"] == [] for row in bare for token in row["logprobs"])

    def test_that_are_no_numbers_are_null(self, tmp_path: Path) -> None:
        logprobs = (TokenLogprob(5, math.nan, ((4, math.nan), (5, -math.inf))),)
        done = Generation("a", (1,), (5,), "x", FinishReason.LENGTH, 1, 0, 0, logprobs=logprobs)
        with OutputFolder(tmp_path) as output:
            output.begin("", [], lambda _: {})
            output.write_generation(Prompt("a", "y"), done)
        row = json.loads((tmp_path / "generations.jsonl").read_text(), parse_constant=pytest.fail)
        assert row["logprobs"] == [{"token_id": 5, "logprob": None, "top": [[4, None], [5, None]]}]


def test_prompts_have_options_of_their_own(own: Callable) -> None:
    options = [None, {"n": 3, "logprobs": 1}, {"n": 1, "seed": 5}, {"n": None}, {"n": 1, "temperature": 0}]
    options += [{"n": 1, "logit_bias": {"5": 100}, "temperature": 0.0}]
    result = own(options, "sampling.n=2")
    rows = sorted((row["id"], row.get("sample"), row.get("seed"), "logprobs" in row) for row in result.rows)
    name = "f.jsonl:{}".format
    expected = [(name(1), 0, 7, False), (name(1), 1, 7, False)]
    expected += [(name(2), sample, 7, True) for sample in range(3)]
    expected += [(name(3), 0, 5, False), (name(4), 0, 7, False), (name(4), 1, 7, False)]
    assert rows == [*expected, (name(5), None, None, False), (name(6), None, None, False)]
    assert texts(result.rows)[name(6), 0] == [5] * 12
    assert "nothing is left to do" in own(options, "sampling.n=2", "resume=true").err
    again = own(options, "sampling.n=2", "overwrite=true", "drafter=pld", "batch_size=1")
    assert texts(again.rows) == texts(result.rows)


HUGE = (2**64, 10**400, -(10**400), 1e308)
OPTIONS = ("temperature", "top_k", "repetition_penalty", "presence_penalty", "n", "seed", "logprobs")
REFUSED: list[tuple[Any, str]] = [
    ({"n": 0}, "sampling.n is 0; it must be a whole number of at least 1"),
    ({"n": "many"}, "sampling.n is 'many'; it must be a whole number of at least 1"),
    ({"temperature": 0}, "sampling.n is 2 at temperature 0, which would give 2 equal texts"),
    ({"logprobs": 999}, "sampling.logprobs is 999, but the model's vocabulary has 260 tokens"),
    ({"best_of": 2}, "sampling.best_of is no option. The options are temperature, top_k, top_p, min_p, typical_p, "),
    ({"top_q": 0.5}, "sampling.top_q is no option; did you mean 'top_p'? The options are"),
    ({"method": "residul"}, "sampling.method is 'residul'; did you mean 'residual'? choose coupled or residual"),
    ({"logit_bias": {"100000": 1}}, "sampling.logit_bias has token 100000, but the model's vocabulary has"),
    ({"temperature": HUGE[1]}, "sampling.temperature is a number of more than 308 digits; it must be 0 or at least"),
    ({"n": HUGE[0]}, "sampling.n is 18446744073709551616; it must be a whole number of at least 1"),
    ({"logit_bias": {"9" * 5000: 1}}, "sampling.logit_bias has a token id "),
]


def test_what_a_prompt_cannot_have_is_a_fault_of_that_one(own: Callable) -> None:
    huge = [{option: number} for option in OPTIONS for number in HUGE]
    huge += [{"logit_bias": {"5": number}, "temperature": 1e-6} for number in HUGE]
    huge += [{"logit_bias": {digits * "9": 1}} for digits in (18, 19)]
    options = [*(how for how, _ in REFUSED), 0.5, *huge, None]
    result = own(options, "sampling.n=2", "max_new_tokens=2", "on_error=skip")
    errors = result.errors
    for number, (_, message) in enumerate(REFUSED, start=1):
        assert errors[f"f.jsonl:{number}"].startswith(f"prompt f.jsonl:{number}: {message}")
    assert "…; it must be a whole number of at least 0, and in the model's vocabulary" in errors[f"f.jsonl:{number}"]
    number = len(REFUSED) + 1
    wrong_type = "field 'how' holds a value of type float; options of sampling are an object, such as"
    assert errors[f"f.jsonl:{number}"].startswith(f"f.jsonl:{number}: {wrong_type}")
    done = {row["id"] for row in result.rows}
    assert f"f.jsonl:{len(options)}" in done
    assert len(done) + len(errors) == len(options)
