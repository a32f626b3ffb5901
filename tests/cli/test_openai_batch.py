"""`data=openai_batch`: a file of OpenAI's Batch API and its answers, through a real chat template."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from emssd import Engine, SamplingParams
from emssd.sequences import Request, StopStrings
from tests.support.tiers import looped

from .conftest import fenced, jsonl

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PAGE = "how_to/openai_batch.md"
ASK = [{"role": "user", "content": "hi"}]


def chat(name: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": ASK, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def completion(name: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "abc", "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}


@pytest.fixture
def batch(decode_records: Callable, chat_model: str) -> Callable[..., Any]:
    """``batch(requests, *arguments)`` answers them; a text stands for a line as it is."""
    options = (f"model.path={chat_model}", "data=openai_batch", "max_new_tokens=6")
    return lambda requests, *arguments: decode_records(requests, *options, *arguments)


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    """By custom_id the lines of the output, each of which has all fields of the format and no other."""
    lines = jsonl(folder / "batch_output.jsonl")
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
    assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def error(line: dict[str, Any]) -> str:
    """The sentence of an answer that is none."""
    assert line["error"] is None
    assert line["response"]["status_code"] == 400
    reason = line["response"]["body"]["error"]
    assert reason == {"message": reason["message"], "type": "invalid_request_error", "param": None, "code": None}
    return str(reason["message"])


def expected(model: str, text: str, **options: Any) -> list[Any]:
    """The library's answer to `text`, whose ``<s>`` is the BOS token, for the request ``a``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stop, sampling = options.get("stop"), options.get("sampling")
    engine = Engine.from_pretrained(model, drafter="none")
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    stops = StopStrings(stop, tokenizer) if stop else None
    request = Request("a", ids, options.get("limit", 6), engine.eos_token_ids, stops, sampling)
    return sorted(engine.run([request]), key=lambda generation: generation.sample)


def test_chats_and_completions_are_answered_in_the_format_of_the_api(batch: Callable, chat_model: str) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "be"}], "name": None}
    requests = [chat("a", messages=[system, *ASK], max_completion_tokens=4), completion("b", prompt=["abc"], user="me")]
    result = batch(requests)
    assert result.status == 0
    assert "config.yaml, batch_output.jsonl" in result.out
    first, second = answers(result.folder).values()
    (answer,) = expected(chat_model, "<s>[s]be[u]hi[a]", limit=4)
    body = first["response"]["body"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    num_prompt, num_new = len("[s]be[u]hi[a]") + 1, len(answer.token_ids)
    assert body == {
        "object": "chat.completion",
        "model": chat_model,
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": answer.text, "refusal": None}, "logprobs": None,
            "finish_reason": {"eos": "stop", "length": "length"}[answer.finish_reason.value],
        }],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }  # fmt: skip
    body = second["response"]["body"]
    (answer,) = expected(chat_model, "abc")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": answer.text, "finish_reason": body["choices"][0]["finish_reason"], "logprobs": None}
    ]


def test_a_request_that_names_no_temperature_is_drawn_as_in_the_api(batch: Callable, chat_model: str) -> None:
    silent = completion("a", temperature=None, max_tokens=12)
    line = answers(batch([silent]).folder)["a"]
    (wanted,) = expected(chat_model, "abc", sampling=SamplingParams(), limit=12)
    assert line["response"]["body"]["choices"][0]["text"] == wanted.text
    line = answers(batch([silent], "data.temperature=0", "overwrite=true").folder)["a"]
    (wanted,) = expected(chat_model, "abc", limit=12)
    assert line["response"]["body"]["choices"][0]["text"] == wanted.text


def test_log_probabilities_of_chats_and_of_completions(batch: Callable, chat_model: str) -> None:
    requests = [chat("a", logprobs=True, top_logprobs=2), chat("b", logprobs=True), completion("c", logprobs=1)]
    lines = answers(batch(requests).folder)
    (wanted,) = expected(chat_model, "<s>[u]hi[a]", sampling=SamplingParams(temperature=0, logprobs=2))
    first, second, third = (lines[name]["response"]["body"]["choices"][0]["logprobs"] for name in "abc")
    assert first["refusal"] is None
    assert [token["logprob"] for token in first["content"]] == near([token.logprob for token in wanted.logprobs])
    for token, wanted_token in zip(first["content"], wanted.logprobs, strict=True):
        assert [other["logprob"] for other in token["top_logprobs"]] == near([share for _, share in wanted_token.top])
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
    ends = wanted.finish_reason.value == "eos"  # which is in no text
    spoken = b"".join(bytes(token["bytes"]) for token in first["content"][: -1 if ends else None])
    assert spoken.decode(errors="replace") == wanted.text
    assert [token["top_logprobs"] for token in second["content"]] == [[]] * len(first["content"])
    assert [token["logprob"] for token in second["content"]] == near([token["logprob"] for token in first["content"]])
    assert third["text_offset"] == [sum(map(len, third["tokens"][:index])) for index in range(len(third["tokens"]))]
    greedy = [max(top.values()) for top in third["top_logprobs"]]
    assert third["token_logprobs"] == greedy
    assert all(math.isfinite(share) and share <= 0 for share in greedy)


def near(numbers: list[float]) -> Any:
    """Log-probabilities in float64, whose last digits depend on what else is in the batch."""
    return pytest.approx(numbers, rel=1e-12)


GOOD, NAME = completion("good"), "a"
REFUSED: list[tuple[Any, str]] = [
    (chat(NAME, tools=[{"type": "function"}]), "{place}: emssd cannot honour tools=[{'type': 'function'}]; leave"),
    (chat(NAME, response_format={"type": "json_schema"}), "{place}: response_format is "),
    (chat(NAME, reasoning_effort="low"), "{place}: emssd cannot honour 'reasoning_effort', which is no option of"),
    (chat(NAME, temperatur=1), "did you mean 'temperature'?"),
    (chat(NAME, prompt="x"), "{place}: emssd cannot honour 'prompt', which is no option of /v1/chat/completions"),
    (chat(NAME, top_logprobs=2), "{place}: top_logprobs is 2 without logprobs=true; add that"),
    (chat(NAME, logprobs=2), "{place}: logprobs is 2; for /v1/chat/completions it must be true or false"),
    (chat(NAME, max_tokens=0), "{place}: max_tokens is 0; it must be a whole number of at least 1"),
    (chat(NAME, max_tokens=1, max_completion_tokens=2), "{place}: max_completion_tokens and max_tokens differ"),
    (chat(NAME, messages=[]), "prompt {place} is no list of messages"),
    (chat(NAME, messages="hi"), "{place}: messages is of type str"),
    (chat(NAME, messages=[{"role": "user"}]), "prompt {place}: message 1 has no text 'content'"),
    (chat(NAME, messages=[{"role": "robot", "content": "x"}]), "prompt {name}: the tokenizer's chat template refuses"),
    (chat(NAME, messages=[ASK[0] | {"tool_calls": [1]}]), "{place}: message 1 has 'tool_calls'"),
    (chat(NAME, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "a part that is no text"),
    (completion(NAME, stop=[""]), "{place}: stop is ['']; it must be a text, or a list of texts"),
    (completion(NAME, prompt=["x", "y"]), "{place}: prompt is a list of 2; write a request for each"),
    (completion(NAME, prompt=None), "{place}: prompt is None; it must be a text, or a list of token ids"),
    (completion(NAME, prompt="x" * 200), "prompt {name} has 200 tokens, and the model takes 96"),
    (completion(NAME, prompt=[10**6]), "prompt {name} has token ids outside the model's vocabulary"),
    (completion(NAME, echo=True), "{place}: emssd cannot honour echo=True; leave it out"),
    (completion(NAME, n=2), "prompt {name}: sampling.n is 2 at temperature 0, which would give 2 equal texts"),
    (completion(NAME, logit_bias={"x": 1}), "prompt {name}: sampling.logit_bias has a token id 'x'"),
    (GOOD | {"custom_id": NAME, "method": "GET"}, "{place}: method is 'GET'; it must be 'POST'"),
    (GOOD | {"custom_id": NAME, "url": "/v1/embeddings"}, "{place}: url is '/v1/embeddings'; emssd answers"),
    (GOOD | {"custom_id": NAME, "body": []}, "{place}: body is of type list; it must be an object"),
    (GOOD | {"custom_id": NAME, "more": 1}, "{place} has a field 'more'; a request has custom_id, method"),
    (GOOD | {"custom_id": 7}, "{place} has no text custom_id; give each request one of its own"),
    ("{", "{place} is not JSON: "),
]


def test_a_request_that_cannot_be_honoured_fails_alone(batch: Callable) -> None:
    requests, wanted = list[Any](), dict[str, str]()
    for number, (request, sentence) in enumerate(REFUSED, start=1):
        line, name = f"f.jsonl:{number}", f"a{number}"
        has_name = isinstance(request, dict) and request["custom_id"] == NAME
        requests.append(request | {"custom_id": name} if has_name else request)
        wanted[name if has_name else line] = sentence.replace("{place}", line).replace("{name}", name)
    result = batch([*requests, GOOD], "max_new_tokens=1", "drafter=none")
    assert result.status == 0
    lines = answers(result.folder)
    assert lines.pop("good")["response"]["status_code"] == 200
    assert lines.keys() == wanted.keys()
    assert [name for name, line in lines.items() if wanted[name] not in error(line)] == []
    assert result.metrics["num_failed_prompts"] == len(REFUSED)


def test_harmless_fields_change_nothing(batch: Callable) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": True, "tools": [], "tool_choice": "none", "stream": False}
    more |= {"response_format": {"type": "text"}, "prediction": {"type": "content", "content": "x"}, "seed": None}
    lines = answers(batch([chat("a"), chat("b", **more)]).folder)
    texts = [line["response"]["body"]["choices"] for line in lines.values()]
    assert texts[0] == texts[1]


@looped(
    "requests, arguments, sentence",
    [
        ([GOOD, chat("a", tools=[1])], ["on_error=fail"], "f.jsonl:2: emssd cannot honour tools=[1]; leave it out"),
        ([GOOD], ["sampling.temperature=0.5"], "sampling.temperature is 0.5; with data=openai_batch each request "
         "names its own, and data.temperature is that of the others"),
        ([GOOD], ["data.temperature=-1"], "data.temperature is -1.0; it must be at least 0"),
        ([], [], "f.jsonl holds no requests: it is empty"),
    ],
)  # fmt: skip
def test_what_ends_the_run_before_it_begins(
    requests: list[Any], arguments: list[str], sentence: str, batch: Callable
) -> None:
    result = batch(requests, *arguments)
    assert result.sentence == sentence
    assert not result.folder.exists()


def test_a_model_without_a_chat_template_takes_completions(batch: Callable, model: str) -> None:
    assert batch([chat("a")], f"model.path={model}").sentence == (
        "a conversation needs a tokenizer with a chat template, and this model's has none, as it is probably no "
        "instruction-tuned model; give one with chat_template=FILE, or prompts as the model knows them, without "
        "data.chat (data.template), or to /v1/completions"
    )
    assert answers(batch([GOOD], f"model.path={model}").folder)["good"]["response"]["status_code"] == 200


def test_a_batch_whose_requests_all_fail_is_answered(batch: Callable) -> None:
    result = batch([chat("a", tools=[1]), completion("b", prompt="x" * 200)])
    assert "none of the 2 prompts can be used" in result.sentence
    assert [error(line)[:8] for line in answers(result.folder).values()] == ["f.jsonl:", "prompt b"]


def test_an_interrupted_batch_goes_on(batch: Callable) -> None:
    requests = [completion("a", temperature=1, n=2, logprobs=1), chat("b"), chat("c", tools=[1]), completion("d")]
    whole = batch(requests)
    before = {name: _settled(line) for name, line in answers(whole.folder).items()}
    assert list(before) == ["a", "b", "d", "c"]
    rows, output = whole.folder / "generations.jsonl", whole.folder / "batch_output.jsonl"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(lines[0] + lines[1][:30])
    again = batch(requests, "resume=true", "drafter=none", "batch_size=1")
    assert again.metrics["num_resumed_prompts"] == 1
    assert {name: _settled(line) for name, line in answers(whole.folder).items()} == before
    output.unlink()  # as if the run had been killed between its last row and the answers
    assert batch(requests, "resume=true").status == 0
    assert {name: _settled(line) for name, line in answers(whole.folder).items()} == before


def _settled(line: dict[str, Any]) -> dict[str, Any]:
    """Without the time, and with no more of log-probabilities than their tokens."""
    line["response"]["body"].pop("created", None)
    for choice in line["response"]["body"].get("choices", []):
        if choice["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"]["tokens"]
    return line


def test_the_commands_of_the_page(emssd: Callable, chat_model: str, work: Path) -> None:
    requests, failed = fenced(PAGE, "json")
    (command,) = fenced(PAGE, "sh")
    (work / "requests.jsonl").write_text(f"{requests}\n")
    words = [word.replace("=DIR", f"={chat_model}") for word in shlex.split(command)]
    assert emssd(*words[3:], "progress=false").status == 0
    lines = answers(work / "answers")
    assert [line["response"]["status_code"] for line in lines.values()] == [200, 200, 400]
    assert list(lines) == ["hello", "three", "tools"]
    assert len(lines["three"]["response"]["body"]["choices"]) == 3
    shown = json.loads(failed)
    assert error(shown) == error(lines["tools"])
