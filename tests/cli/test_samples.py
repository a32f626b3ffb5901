"""Several rows of a prompt, and log-probabilities, from the command line: written, resumed, and refused."""

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
from tests.support.tiers import looped

SAMPLED = ("sampling=sampled", "sampling.temperature=0.8", "sampling.seed=7", "max_new_tokens=12", "ignore_eos=true")


def texts(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    return {(row["id"], row["sample"]): row["token_ids"] for row in rows}


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
    assert alone == {place: text for place, text in texts(first.rows).items() if place[1] == 0}


def test_a_prompt_on_the_command_line_gives_all_of_its_texts(emssd: Callable, model: str) -> None:
    result = emssd(f"model.path={model}", "prompt=abc", *SAMPLED, "sampling.n=2", "output_dir=out")
    assert result.status == 0
    words = [set(re.findall(r"[A-Za-z0-9]{2,}", row["text"])) for row in result.rows]  # other bytes may not be shown
    assert words[0] != words[1]
    assert all(word in result.out for word in words[0] | words[1])


def test_a_difference_says_which_sample_it_is_in(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from emssd.decoding import engine

    right = engine.verify

    def wrong(chosen, draft, *others):
        verified = right(chosen, draft, *others)
        for row in verified if draft.indptr[-1] else ():  # so that the plain run stays right
            row.new_tokens[-1] = 5
        return verified

    monkeypatch.setattr(engine, "verify", wrong)
    cold = ("sampling.temperature=0.05", "max_new_tokens=24", "budget=fixed", "data.limit=1")  # it repeats itself
    result = decode(*SAMPLED, *cold, "sampling.n=2", "check=plain")
    details = result.metrics["check"]["details"]
    assert {each["sample"] for each in details} == {0, 1}
    assert result.metrics["check"]["differences"] == len(details)
    assert all(each["margin"] > each["tolerance"] for each in details)
    assert ", sample 1, at new token" in result.out


@pytest.fixture
def job(emssd: Callable, model: str, prompts: Path) -> Callable[..., Any]:
    """``job(*arguments)`` goes on with the job in ``out``."""

    def run(*arguments: str) -> Any:
        data = ("data=text", f"data.path={prompts}", "output_dir=out", "resume=true", "progress=false")
        return emssd(f"model.path={model}", *data, *SAMPLED, *arguments)

    return run


class TestResume:
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
        said = job().sentence
        assert "out holds sample 1 of 'prompts.txt:" in said
        assert said.endswith(
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
            assert [each["token_id"] for each in row["logprobs"]] == row["token_ids"]
            for each in row["logprobs"]:
                assert each["top"][0] == [each["token_id"], each["logprob"]], "greedy rows have the best token"
                assert 0 >= each["logprob"] > each["top"][1][1]
        without = decode("max_new_tokens=8").rows
        assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in without]
        assert not any("logprobs" in row for row in without)
        bare = decode("sampling.logprobs=0", "max_new_tokens=2").rows
        assert all(each["top"] == [] for row in bare for each in row["logprobs"])

    def test_that_are_no_numbers_are_null(self, tmp_path: Path) -> None:
        logprobs = (TokenLogprob(5, math.nan, ((4, math.nan), (5, -math.inf))),)
        done = Generation("a", (1,), (5,), "x", FinishReason.LENGTH, 1, 0, 0, logprobs=logprobs)
        with OutputFolder(tmp_path) as output:
            output.begin("", [], lambda _: {})
            output.write_generation(Prompt("a", "y"), done)
        row = json.loads((tmp_path / "generations.jsonl").read_text(), parse_constant=pytest.fail)
        assert row["logprobs"] == [{"token_id": 5, "logprob": None, "top": [[4, None], [5, None]]}]


@pytest.fixture
def with_records(emssd: Callable, model: str, work: Path) -> Callable[..., Any]:
    """``with_records(*options)`` decodes prompts that have these options of their own."""

    def run(*options: Any) -> Any:
        path = work / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": "a b c", "how": each}) + "\n" for each in options))
        data = ("data=jsonl", f"data.path={path}", "data.sampling_field=how", "output_dir=out", "resume=true")
        return emssd(f"model.path={model}", *data, "max_new_tokens=6", "ignore_eos=true", "sampling.n=2", *SAMPLED[:3])

    return run


def test_prompts_have_numbers_of_samples_and_logprobs_of_their_own(with_records: Callable) -> None:
    options = (None, {"n": 3, "logprobs": 1}, {"n": 1, "seed": 5}, {"n": None}, {"n": 1, "temperature": 0})
    result = with_records(*options)
    assert result.status == 0
    found = sorted((row["id"], row.get("sample"), row.get("seed"), "logprobs" in row) for row in result.rows[:])
    name = "prompts.jsonl:{}".format
    expected = [(name(1), 0, 7, False), (name(1), 1, 7, False)]
    expected += [(name(2), sample, 7, True) for sample in range(3)]
    expected += [(name(3), 0, 5, False), (name(4), 0, 7, False), (name(4), 1, 7, False), (name(5), None, None, False)]
    assert found == expected
    assert "nothing is left to do" in with_records(*options).err


ALL = "temperature, top_k, top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty, "


@looped(
    "how, message",
    [
        ({"n": 0}, "prompt prompts.jsonl:1: sampling.n is 0; it must be a whole number of at least 1"),
        ({"n": "many"}, "prompt prompts.jsonl:1: sampling.n is 'many'; it must be a whole number of at least 1"),
        (
            {"temperature": 0},
            "prompt prompts.jsonl:1: sampling.n is 2 at temperature 0, which would give 2 equal texts",
        ),
        ({"top_p": 2}, "prompt prompts.jsonl:1: sampling.top_p is 2; it must be above 0, and at most 1"),
        ({"logprobs": -1}, "prompt prompts.jsonl:1: sampling.logprobs is -1; it must be a whole number of at least 0"),
        (
            {"logprobs": 999},
            "prompt prompts.jsonl:1: sampling.logprobs is 999, but the model's vocabulary has 260 tokens",
        ),
        ({"best_of": 2}, f"prompt prompts.jsonl:1: sampling.best_of is no option. The options are {ALL}"),
    ],
    at_a_time=3,
)
def test_what_a_prompt_cannot_have_is_refused_in_a_sentence(how: Any, message: str, with_records: Callable) -> None:
    assert with_records(how).sentence.startswith(message)
