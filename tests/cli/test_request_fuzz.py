"""Whatever a request holds, it is the fault of that request alone: the others give their texts, and nothing hangs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from emssd import Engine, SamplingParams
from emssd.cli import job
from emssd.data.prompts import Prompt
from emssd.errors import EmssdError
from emssd.sequences import Request, StopStrings
from tests.support.tiers import few

_DEEP: Any = "x"
for _ in range(400):
    _DEEP = [_DEEP]
_ODD = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), -float("inf"), "", "a", "5", "\ud800", "a\udc80b", "\x00", "\u2028", "</s>", "<s>",
    "{", "x" * 9999, "é€😀", [], {}, [[]], [None], ["a"], ["", "a"], ["\ud800"], [5], [-1], [2**70], {"a": 1},
    {"role": "user"}, {"5": 1}, {"5": "x"}, _DEEP,
]  # fmt: skip
_SCHEMAS: list[Any] = [
    {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"type": "integer"}, {"type": "nothing"}, {"const": "\ud800"},
    {"enum": []}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
]  # fmt: skip
_GRAMMARS = [
    "json", "regex:[0-9]{2}", "regex:(", "regex:\ud800", "regex:[ab]+é", "lark:start: start", "lark:x", "nowhere.json",
    "lark:start: /[ab]/ <[2]>", "lark:start: <[2]>", "/.lark", "\x00.json", *_SCHEMAS,
]  # fmt: skip
_RIGHT: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1], "top_p": [0.5, 1], "top_k": [0, 2], "n": [1, 2], "seed": [0, 7],
    "stop": ["a", ["b", "c"]], "logprobs": [0, 2], "grammar": _GRAMMARS, "logit_bias": [{"5": 1}, {"3": -100}],
    "max_tokens": [1, 3], "prompt": ["ab", "a b c", [5, 6]], "messages": [[{"role": "user", "content": "hi"}]],
    "response_format": [{"type": "json_schema", "json_schema": {"schema": grammar}} for grammar in _GRAMMARS],
}  # fmt: skip
_NAMES = [*(option.name for option in fields(SamplingParams)), "best_of", ""]
_GOOD = "abc"


def odd(draw: random.Random, name: str = "") -> Any:
    """A value that may be right for `name`, or wrong; samples of a prompt stay few."""
    value = draw.choice(_RIGHT[name] if name in _RIGHT and draw.random() < 0.5 else _ODD)
    if isinstance(value, (list, dict)) and draw.random() < 0.2:
        return [value, draw.choice(_ODD)] if isinstance(value, list) else value | {"more": draw.choice(_ODD)}
    return value


def options(draw: random.Random, names: list[str]) -> dict[str, Any]:
    return {name: odd(draw, name) for name in draw.sample(names, draw.choice((0, 1, 1, 2, 3)))}


def line_of(record: dict[str, Any], draw: random.Random) -> bytes:
    """Its JSON; now and then cut, or with bytes that are no UTF-8."""
    line = json.dumps(record).encode()
    if draw.random() < 0.05:
        return line[: draw.randrange(1, len(line))]
    return line.replace(b"a", b"\xff", 1) if draw.random() < 0.03 else line


def jsonl(draw: random.Random, number: int) -> dict[str, Any]:
    record = {"id": f"odd {number}", "prompt": "ab", "limit": 2, "how": options(draw, _NAMES)}
    return record | {name: odd(draw, name) for name in draw.sample([*record, "more"], draw.choice((0, 0, 1, 2)))}


def openai(draw: random.Random, number: int) -> dict[str, Any]:
    is_chat = draw.random() < 0.5
    body = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "ab"}
    names = ["max_tokens", "stop", "logprobs", "top_logprobs", "response_format", "tools", "stream", *body, *_NAMES[:9]]
    body |= {"max_tokens": 2} | options(draw, names)
    line = {"custom_id": f"odd {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    line["url"] = line["url"] if is_chat else "/v1/completions"
    return line | {name: odd(draw, name) for name in draw.sample([*line, "more"], draw.choice((0, 0, 0, 1)))}


def prompt_of(draw: random.Random, number: int) -> Prompt:
    """One of a plugin's source, which may be anything."""
    values = {"max_new_tokens": 2, "sampling": options(draw, _NAMES)} | options(
        draw, [option.name for option in fields(Prompt)]
    )
    return Prompt(**{"prompt_id": f"odd {number}", "text": "ab"} | values)


def good(kind: str, number: int) -> Any:
    if kind == "openai_batch":
        body = {"prompt": _GOOD, "max_tokens": 3, "temperature": 0}
        return {"custom_id": f"good {number}", "method": "POST", "url": "/v1/completions", "body": body}
    return {"id": f"good {number}", "prompt": _GOOD, "limit": 3, "how": None}


@pytest.fixture
def fuzz(
    emssd: Callable, chat_model: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int, int], None]:
    """``fuzz(kind, seed, number)`` decodes so many odd requests in one job, each after a good one."""
    expected = Engine.from_pretrained(chat_model, drafter="none", compile=False).generate([_GOOD], 3)[0].text

    def run(kind: str, seed: int, number: int) -> None:
        draw = random.Random(seed)
        make: Any = {"jsonl": jsonl, "openai_batch": openai, "plugin": prompt_of}[kind]
        made = [make(draw, index) for index in range(number)]
        common = [f"model.path={chat_model}", "output_dir=out", "overwrite=true", "progress=false", "on_error=skip"]
        if kind == "plugin":
            mixed = [
                prompt
                for index, odd in enumerate(made)
                for prompt in (Prompt(f"good {index}", _GOOD, max_new_tokens=3), odd)
            ]
            monkeypatch.setattr(job, "prompts_of", lambda *_: mixed)
            result = emssd(*common)
        else:
            lines = [line for index, odd in enumerate(made)
                     for line in (json.dumps(good(kind, index)).encode(), line_of(odd, draw))]  # fmt: skip
            (work / "f.jsonl").write_bytes(b"\n".join(lines) + b"\n")
            names = ["data.id_field=id", "data.max_new_tokens_field=limit", "data.sampling_field=how"]
            result = emssd(*common, f"data={kind}", "data.path=f.jsonl", *(names if kind == "jsonl" else []))
        assert result.status == 0, (seed, result.err)
        rows = [row for row in result.rows if str(row["id"]).startswith("good ")]
        assert [row["text"] for row in rows] == [expected] * number, seed
        failed = [json.loads(line) for line in (work / "out" / "errors.jsonl").read_bytes().splitlines()]
        dead_ends = {row["id"] for row in failed if "can go on with an output of the grammar" in row["error"]}
        answered = {row["id"] for row in result.rows} - dead_ends  # of some, another sample has a row
        assert len(answered) + len(failed) == 2 * number, seed

    return run


_SEEDS = [(kind, seed) for seed in range(31) for kind in ("jsonl", "openai_batch", "plugin")]


@pytest.mark.parametrize(("kind", "seed"), few(_SEEDS, ci=3))
def test_a_request_is_wrong_for_itself_alone(kind: str, seed: int, fuzz: Callable) -> None:
    fuzz(kind, seed, 100 if seed else 25)


def ask(engine: Engine, draw: random.Random) -> None:
    """One call of the library with an odd argument; in the middle of a run of good ones."""
    how = options(draw, _NAMES[:-2])
    arguments = {"max_new_tokens": 2} | {
        name: odd(draw, "max_tokens") for name in ("max_new_tokens",) if draw.random() < 0.3
    }
    stop = odd(draw, "stop") if draw.random() < 0.3 else ()
    prompts = odd(draw) if draw.random() < 0.1 else [_GOOD, odd(draw, "prompt")]
    if draw.random() < 0.5:
        engine.generate(prompts, **arguments, stop=stop, sampling=SamplingParams(**how) if how else None)
        return
    ids = tuple(odd(draw) for _ in range(2)) if draw.random() < 0.3 else (5, 6)
    stops = StopStrings(stop, engine.tokenizer) if stop else None
    engine.add(Request("odd", ids, **arguments, stop=stops, sampling=SamplingParams(**how) if how else None))
    engine.add(Request("good", (5, 6), 2))
    rows = {}
    while engine.has_work:
        rows |= {row.request_id: row for row in engine.step()}
    assert len(rows["good"].output_ids) == 2


@pytest.fixture(scope="module")
def engine(chat_model: str) -> Engine:
    return Engine.from_pretrained(chat_model, drafter="suffix", compile=False)


@pytest.mark.parametrize(("seed", "number"), few([(0, 60), (1, 3000)], ci=1))
def test_a_wrong_call_of_the_library_is_refused(seed: int, number: int, engine: Engine) -> None:
    draw = random.Random(seed)
    for case in range(number):
        try:
            ask(engine, draw)
        except EmssdError:
            engine.clear()
        except Exception as error:
            raise AssertionError(case) from error
