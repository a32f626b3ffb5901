"""`TextGenerator`, as an actor of Ray Data calls it: rows of several calls in one batch, each with its outcome."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emssd import Engine, SamplingParams
from emssd.errors import ConfigError, PromptError
from emssd.integrations.ray import TextGenerator
from tests.support.tiers import looped

PROMPTS = ["The for statement", "Lambda expressions are", "A class", "An assert", "To import a", "A list"]


OPTIONS = {"dtype": "float64", "batch_size": 3, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def alone() -> Engine:
    """Decodes each row by itself."""
    return Engine.from_pretrained("demo", dtype="float64", drafter="none", batch_size=1)


def generate(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The batch with the columns of a new actor."""
    columns = {name: np.array(values, dtype=object) for name, values in batch.items()}
    return asyncio.run(TextGenerator("demo", **OPTIONS, **options)(columns))


def test_calls_share_batches_and_a_row_that_cannot_be_fails_its_call_alone(alone: Engine) -> None:
    actor = TextGenerator("demo", **OPTIONS, drafter="llma")

    async def calls(*batches: list[Any]) -> list[Any]:
        columns = [np.fromiter(batch, dtype=object, count=len(batch)) for batch in batches]
        return await asyncio.gather(*(actor({"prompt": column}) for column in columns), return_exceptions=True)

    first, wrong, second = asyncio.run(calls(PROMPTS[:2], [[5, 6], [10**6]], PROMPTS[2:]))
    wanted = [row.text for row in alone.generate(PROMPTS, 8)]
    assert [*first["generated_text"], *second["generated_text"]] == wanted
    assert isinstance(wrong, PromptError)
    assert "token ids outside the model's vocabulary" in str(wrong)
    assert actor.engine.report.num_row_steps > 2 * actor.engine.report.num_steps
    assert actor.engine.runner.usage.held == 0


def test_a_step_that_fails_fails_the_calls_of_its_rows_and_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, column = TextGenerator("demo", **OPTIONS), np.array(PROMPTS[:2], dtype=object)

    async def both() -> list[Any]:
        return await asyncio.gather(*(actor({"prompt": column}) for _ in range(2)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(actor.engine.runner, "run", lambda packed: 1 // 0)
        assert [type(outcome) for outcome in asyncio.run(both())] == [ZeroDivisionError] * 2
    assert not actor.engine.has_work
    first, second = asyncio.run(both())
    assert list(first["generated_text"]) == list(second["generated_text"])


def test_a_batch_gets_its_columns_in_its_order(alone: Engine) -> None:
    ids = alone.tokenizer(PROMPTS[1])["input_ids"]
    prompts = np.empty(3, dtype=object)
    prompts[:] = [PROMPTS[0], np.array(ids), PROMPTS[2]]
    out = generate({"prompt": prompts, "more": [1, 2, 3]})
    wanted = alone.generate([PROMPTS[0], ids, PROMPTS[2]], 8)
    assert list(out) == ["prompt", "more", "generated_text", "generated_token_ids", "finish_reason"]
    assert list(out["generated_text"]) == [row.text for row in wanted]
    assert [tuple(row) for row in out["generated_token_ids"]] == [row.token_ids for row in wanted]
    assert list(out["finish_reason"]) == [row.finish_reason.value for row in wanted]


def test_what_is_drawn_depends_on_the_id_of_a_row_alone() -> None:
    options = {"sampling": SamplingParams(seed=1), "id_column": "id", "ignore_eos": True}
    both = generate({"prompt": [PROMPTS[0]] * 2, "id": ["a", "b"]}, **options)["generated_text"]
    one = generate({"prompt": [PROMPTS[0]], "id": ["b"]}, **options)["generated_text"]
    assert both[0] != both[1]
    assert both[1] == one[0]


@looped(
    ("columns", "options", "sentence"),
    [
        ({"text": ["x"]}, {}, "there is no column 'prompt'; the columns are text"),
        ({"prompt": ["x"], "finish_reason": ["y"]}, {}, "the column 'finish_reason' is there already"),
        ({"prompt": ["x"]}, {"sampling": SamplingParams()}, "name the column with id_column="),
        ({"prompt": ["x"]}, {"sampling": SamplingParams(n=2)}, "sampling.n is 2, and a row has one text"),
    ],
)
def test_what_cannot_be(columns: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        generate(columns, **options)


@pytest.mark.nightly
def test_the_job_of_the_page_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: nox -s ray, or pip install 'emssd[ray]'")
    monkeypatch.chdir(tmp_path)
    for number in (2, 6):
        lines = [json.dumps({"id": n, "question": PROMPTS[n]}) for n in range(number)]
        Path("questions.jsonl").write_text("\n".join(lines))
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ray_data.py"))
    answers = [json.loads(line) for file in Path("answers").iterdir() for line in file.read_text().splitlines()]
    wanted = Engine.from_pretrained("demo", drafter="none", batch_size=1).generate(PROMPTS, 16)
    assert sorted((row["id"], row["generated_text"]) for row in answers) == [*enumerate(row.text for row in wanted)]
