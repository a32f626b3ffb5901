"""OpenAI's own client asks ``emssd serve``, and gets what the library gives for its prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from emssd import Engine, SamplingParams

from .serving import ASK, Client, alone, client, serving

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")
__all__ = ["alone", "client"]  # fixtures
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def api(client: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0, timeout=60) as api:
        yield api


def test_a_chat_is_answered_through_its_template_and_streamed(api: Any, alone: Callable) -> None:
    options = {"model": api.models.list().data[0].id, "messages": ASK, "temperature": 0, "max_completion_tokens": 20}
    answer = api.chat.completions.create(**options)
    (wanted,) = alone("<s>[u]hi[a]", 20)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", wanted.text, "length")
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29,
    }  # fmt: skip
    first, *parts = api.chat.completions.create(**options, stream=True)
    assert (first.object, first.choices[0].delta.role) == ("chat.completion.chunk", "assistant")
    assert len({part.id for part in (first, *parts)}) == 1
    assert len(parts) > 1
    assert "".join(part.choices[0].delta.content for part in parts) == wanted.text


def test_texts_follow_the_options_of_their_request_and_streams_bring_the_same(api: Any, alone: Callable) -> None:
    options = {"n": 3, "seed": 7, "temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    body = options | {"model": "tiny", "prompt": "abc", "max_tokens": 30, "stop": ["e", "T"]}
    body |= {"logit_bias": {"70": 3}, "extra_body": {"top_k": 40}}
    sampling = SamplingParams(**options, top_k=40, logit_bias={70: 3})
    rows = alone("abc", 30, sampling=sampling, stop=["e", "T"])
    wanted = [(row.text, {"eos": "stop"}.get(row.finish_reason.value, row.finish_reason.value)) for row in rows]
    assert "stop" in dict(wanted).values()
    choices = api.completions.create(**body, logprobs=0).choices
    assert [(choice.text, choice.finish_reason) for choice in choices] == wanted
    assert [len(choice.logprobs.tokens) for choice in choices] == [len(row.token_ids) for row in rows]
    *events, last = api.completions.create(**body, stream=True, stream_options={"include_usage": True})
    streamed: list[list[Any]] = [["", None] for _ in rows]
    for event in events:
        (choice,) = event.choices
        assert streamed[choice.index][1] is None
        streamed[choice.index] = [streamed[choice.index][0] + choice.text, choice.finish_reason]
    assert [*map(tuple, streamed)] == wanted
    assert (last.choices, last.usage.completion_tokens) == ([], sum(len(row.token_ids) for row in rows))


def test_a_seed_repeats_an_answer_and_without_one_it_is_another(api: Any) -> None:
    def texts(**body: Any) -> set[str]:
        answers = [api.completions.create(model="tiny", prompt="abc", max_tokens=12, **body) for _ in range(2)]
        return {answer.choices[0].text for answer in answers}

    assert len(texts(seed=3)) == 1
    assert len(texts()) == len(texts(seed=None)) == 2


def test_answers_have_the_form_of_their_schema(api: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    chat = api.chat.completions.create(model="tiny", messages=ASK, response_format=form, max_tokens=60, seed=1)
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = api.responses.create(model="tiny", input="hi", text=text, max_output_tokens=60, extra_body={"seed": 1})
    assert json.loads(chat.choices[0].message.content)["a"] in (True, False)
    assert response.output_text == chat.choices[0].message.content


def test_a_response_is_the_answer_of_a_chat_and_goes_on_from_earlier_ones(api: Any, alone: Callable) -> None:
    options = {"model": "tiny", "temperature": 0, "max_output_tokens": 4}
    first = api.responses.create(input="hi", instructions="be", **options)
    (wanted,) = alone("<s>[s]be[u]hi[a]", 4)
    assert (first.output_text, first.status, first.error) == (wanted.text, "incomplete", None)
    assert first.incomplete_details.reason == "max_output_tokens"
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (14, 4, 18)
    asked = [ASK[0], *first.output, {"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]
    second = api.responses.create(input=asked, **options)
    assert second.output_text == alone(f"<s>[u]hi[a]{first.output_text}[u]ab[a]", 4)[0].text


@pytest.mark.parametrize(("limit", "status"), [(3, "incomplete"), (40, "completed")])
def test_the_events_of_a_response(limit: int, status: str, api: Any, alone: Callable) -> None:
    (wanted,) = alone("<s>[u]hi[a]", limit)
    with api.responses.stream(model="tiny", input=ASK, temperature=0, max_output_tokens=limit) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    names = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", status]
    assert names == [*begin, *["output_text.delta"] * len(deltas), *end]
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == wanted.text


def test_a_request_that_cannot_be_honoured_raises_the_reason(api: Any) -> None:
    for ask in (api.chat.completions, api.responses):
        name = "input" if ask is api.responses else "messages"
        with pytest.raises(openai.BadRequestError, match=r"emssd cannot honour tools=\[{'type': 'function'}\]"):
            ask.create(model="tiny", tools=[{"type": "function"}], stream=True, **{name: ASK})


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["demo", "gsm-llama-16m"])
def test_models_that_were_trained_answer_as_the_library_does(name: str, request: pytest.FixtureRequest) -> None:
    path = name if name == "demo" else str(request.getfixturevalue("shared") / "models" / name)
    prompts = [f"<s>Question: A box holds {number} pens. How many are in 3 boxes?\nAnswer:" for number in range(8)]
    lone = Engine.from_pretrained(path, dtype="float32", compile=False, drafter="none", batch_size=1)
    cells: list[tuple[dict[str, Any], list[str]]] = [
        ({"temperature": 0.0}, []), ({"temperature": 0.8, "seed": 5, "n": 2}, []), ({"temperature": 0.0}, ["."]),
    ]  # fmt: skip
    with (
        serving(path, dtype="float32", batch_size=4) as client,
        openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0, timeout=60) as api,
        ThreadPoolExecutor(8) as pool,
    ):
        for options, stop in cells:
            body = options | {"model": "m", "max_tokens": 40} | ({"stop": stop} if stop else {})
            more = {"sampling": SamplingParams(**options), "stop": stop}
            rows = [lone.generate([prompt], 40, **more) for prompt in prompts]
            wanted = [[row.text for row in texts] for texts in rows]
            answers = pool.map(lambda prompt, body=body: api.completions.create(prompt=prompt, **body), prompts)
            assert [[choice.text for choice in answer.choices] for answer in answers] == wanted
            streamed = ["" for _ in wanted[0]]
            for event in api.completions.create(prompt=prompts[0], stream=True, **body):
                streamed[event.choices[0].index] += event.choices[0].text
            assert streamed == wanted[0]
        if lone.tokenizer.chat_template is None:
            with pytest.raises(openai.BadRequestError, match="a conversation needs a tokenizer with a chat template"):
                api.chat.completions.create(model="m", messages=ASK)
