"""An engine in a thread of its own: rows of many callers in one batch, each with its outcome; `TextGenerator`."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from emssd import Engine, SamplingParams
from emssd.errors import ConfigError, EmssdError, PromptError
from emssd.integrations.engine_thread import EngineThread
from emssd.integrations.ray import TextGenerator
from emssd.sequences import Request, Row
from tests.support.tiers import looped

PROMPTS = ["The for statement", "Lambda expressions are", "A class", "An assert", "To import a", "A list"]
DRAWN = SamplingParams(temperature=0.8, seed=3, n=2)


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    thread = EngineThread(Engine.from_pretrained("demo", dtype="float64", drafter="llma", batch_size=3))
    yield thread
    thread.close()
    assert not thread._thread.is_alive()


@pytest.fixture(scope="module")
def alone() -> Engine:
    """Decodes each row by itself."""
    return Engine.from_pretrained("demo", dtype="float64", drafter="none", batch_size=1)


def test_callers_in_many_threads_get_their_own_rows(thread: EngineThread, alone: Engine) -> None:
    def ask(number: int) -> list[tuple[int, ...]]:
        ids = tuple(thread.engine.tokenizer(PROMPTS[number])["input_ids"])
        sampling = DRAWN if number % 2 else None
        done = thread.submit(Request("same" if number % 2 else str(number), ids, 12, sampling=sampling))
        return [future.result(timeout=60).token_ids for future in done]

    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(ask, range(len(PROMPTS))))
    assert thread.engine.report.num_row_steps > thread.engine.report.num_steps  # they shared batches
    for number, rows in enumerate(found):
        ids = tuple(alone.tokenizer(PROMPTS[number])["input_ids"])
        request = Request("same" if number % 2 else "x", ids, 12, sampling=DRAWN if number % 2 else None)
        done = sorted(alone.run([request]), key=lambda generation: generation.sample)
        assert rows == [each.token_ids for each in done]


def test_a_row_that_cannot_be_fails_alone(thread: EngineThread) -> None:
    (good,) = thread.submit(Request("a", (5, 6), 3))
    (bad,) = thread.submit(Request("b", (10**6,), 3))
    with pytest.raises(PromptError, match="token ids outside the model's vocabulary"):
        bad.result(timeout=60)
    assert len(good.result(timeout=60).token_ids) == 3


def test_a_step_that_fails_fails_its_rows_and_no_later_ones(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(thread.engine.runner, "run", lambda packed: 1 // 0)
        (first,) = thread.submit(Request("a", (5, 6), 3))
        with pytest.raises(ZeroDivisionError):
            first.result(timeout=60)
    (second,) = thread.submit(Request("a", (5, 6), 3))
    assert len(second.result(timeout=60).token_ids) == 3


def test_a_cancelled_row_is_given_up_and_the_others_go_on(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, cancelled, step = Event(), Event(), thread.engine.step

    def slow_step() -> list[Row]:
        finished = step()
        running.set()
        cancelled.wait(60)
        return finished

    with monkeypatch.context() as patch:
        patch.setattr(thread.engine, "step", slow_step)
        first, second, waiting, *_ = [future for each in "abcde" for future in thread.submit(Request(each, (5, 6), 9))]
        running.wait(60)
        assert first.cancel()
        assert waiting.cancel()
        cancelled.set()
        assert len(second.result(timeout=60).token_ids) == 9
    (later,) = thread.submit(Request("f", (5, 6), 3))
    assert len(later.result(timeout=60).token_ids) == 3
    assert not thread.engine.has_work
    assert thread.engine.runner.usage.held == 0


def test_nobody_waits_for_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = EngineThread(Engine.from_pretrained("demo", drafter="none"))
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    monkeypatch.setattr(ends, "_finish", lambda sequence: 1 // 0)
    for _ in range(2):
        (future,) = ends.submit(Request("a", (5, 6), 1))
        with pytest.raises(EmssdError, match=r"this engine has ended \(ZeroDivisionError: .*\); make another one"):
            future.result(timeout=60)
    ends.close()


@pytest.fixture(scope="module")
def generate() -> Any:
    """``generate(batch, **options)`` as an actor of Ray Data would."""

    def run(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
        made = TextGenerator("demo", dtype="float64", batch_size=2, max_new_tokens=8, **options)
        columns = {name: np.array(values, dtype=object) for name, values in batch.items()}
        return asyncio.run(made(columns))

    return run


def test_a_batch_gets_its_columns_in_its_order(generate: Any, alone: Engine) -> None:
    ids = alone.tokenizer(PROMPTS[1])["input_ids"]
    prompts = np.empty(3, dtype=object)
    prompts[:] = [PROMPTS[0], np.array(ids), PROMPTS[2]]
    out = generate({"prompt": prompts, "more": [1, 2, 3]})
    wanted = alone.generate([PROMPTS[0], ids, PROMPTS[2]], 8)
    assert list(out) == ["prompt", "more", "generated_text", "generated_token_ids", "finish_reason"]
    assert list(out["generated_text"]) == [each.text for each in wanted]
    assert [tuple(row) for row in out["generated_token_ids"]] == [each.token_ids for each in wanted]
    assert list(out["finish_reason"]) == [each.finish_reason.value for each in wanted]


def test_what_is_drawn_depends_on_the_id_of_a_row_alone(generate: Any) -> None:
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
def test_what_cannot_be(columns: dict[str, Any], options: dict[str, Any], sentence: str, generate: Any) -> None:
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
