"""``emssd serve``: all clients share a batch, each has its own errors, and the server begins and ends as it should.

`test_openai_client.py` has the answers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from emssd import Engine
from emssd.cli.config import ServeConfig
from emssd.data.openai import CHAT, COMPLETIONS, RESPONSES
from tests.support.tiers import few, looped

from .serving import ASK, Client, alone, client, serve, serving
from .test_request_fuzz import line_of, openai

__all__ = ["alone", "client"]  # fixtures
LONG = {"max_tokens": 80, "temperature": 0, "logit_bias": {"2": -1e9}}  # without EOS


def test_clients_share_the_batch_and_each_gets_the_text_of_its_prompt(client: Client, alone: Callable) -> None:
    before = client.engine.report.num_steps, client.engine.report.num_row_steps
    prompts = [f"{letter * 3} {letter}" for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda text: client.ask(COMPLETIONS, prompt=text, temperature=0, max_tokens=12), prompts)
        assert [answer["choices"][0]["text"] for answer in answers] == [alone(text, 12)[0].text for text in prompts]
    steps, row_steps = client.engine.report.num_steps - before[0], client.engine.report.num_row_steps - before[1]
    assert row_steps > steps


@looped(
    "url, body, sentence",
    [
        (CHAT, b"{", "the request cannot be read: "),
        (CHAT, b"[]", "the request cannot be read: "),
        (CHAT, b"[" * 100_000, "the request cannot be read: its brackets are nested too deeply"),
        (CHAT, b"\xff", "the request cannot be read: "),
        (CHAT, b"7", "the request cannot be read: "),
        (CHAT, {"messages": ASK, "stream": 5}, "its stream cannot be 5"),
        (CHAT, {"messages": ASK, "stream_options": {"include_usage": 5}}, "its stream_options cannot be"),
        (CHAT, {"messages": ASK, "tools": [1]}, "the request: emssd cannot honour tools=[1]; leave it out"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}], "stream": True}, "chat template refuses"),
        (COMPLETIONS, {"prompt": "x" * 200}, "prompt of the request has 200 tokens, and the model takes 96"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1, "stream": True}, "of the request: sampling.temperature is"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "text"}}, "emssd cannot honour 'response_format'"),
        (RESPONSES, {}, "the request: input is of type NoneType; it must be a text, or a list of messages"),
        (RESPONSES, {"input": [5]}, "prompt the request: message 1 has no text 'role'"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "message 1 has 'type'; emssd takes role, content and name"),
        (RESPONSES, {"input": [ASK[0] | {"content": [{"type": "input_image"}]}]}, "a part that is no text"),
        (RESPONSES, {"input": "a", "instructions": 5}, "message 1 has no text 'content'"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens is 0; it must be a whole number"),
        (RESPONSES, {"input": "a", "previous_response_id": "x"}, "emssd cannot honour 'previous_response_id'"),
        (RESPONSES, {"input": "a", "text": {"verbosity": "low"}}, "emssd takes its format alone"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format is {'type': 'json_sch"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_honoured_is_answered_with_the_reason(
    url: str, body: Any, sentence: str, client: Client
) -> None:
    """`test_openai_batch.py` has more of what a body cannot have."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.http.post(url, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize(("seed", "number"), few([(0, 12), (1, 2000)], ci=1))
def test_whatever_a_request_holds_is_its_own_fault(seed: int, number: int, client: Client) -> None:
    draw = random.Random(seed)
    for index in range(number):
        line = openai(draw, index)
        url, body = line["url"] if line["url"] in (CHAT, COMPLETIONS) else CHAT, line["body"]
        if url == CHAT and isinstance(body, dict) and index % 2:
            url, body = RESPONSES, {"input": body.pop("messages", None), **body}
        answer = client.http.post(url, content=line_of(body, draw))
        assert answer.status_code in (200, 400), (index, line)
        assert '"server_error"' not in answer.text, (index, line)
    assert client.ask(COMPLETIONS, prompt="abc")["choices"]


def test_the_other_addresses(client: Client) -> None:
    assert client.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.http.get("/health").json() == {"status": "ok"}
    assert client.http.get("/v1/embeddings").status_code == 404
    assert client.http.get(CHAT).status_code == 405


def test_a_model_without_a_template_takes_completions(model: str) -> None:
    with serving(model) as client:
        assert "a conversation needs a tokenizer with a chat template" in client.ask(CHAT, 400, messages=ASK)
        assert client.ask(COMPLETIONS, prompt="abc")["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_rows_up(stream: bool, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before, began = client.engine.step, client.engine.report.num_new_tokens, threading.Event()
    body = json.dumps({"prompt": "abc", "stream": stream} | LONG).encode()
    asking = socket.create_connection(client.address)

    def leaves() -> Any:
        asking.close()
        began.set()
        return step()

    monkeypatch.setattr(client.engine, "step", leaves)
    asking.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert began.wait(60)
    for _ in range(3):
        client.ask(COMPLETIONS, prompt="x", max_tokens=1)
    assert not client.engine.has_work
    assert not client.server.shared._watched
    assert 3 < client.engine.report.num_new_tokens - before < 80


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_another_call_finishes_are_answered(
    stream: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = client.server.shared
    begin = shared._begin
    monkeypatch.setattr(shared, "_begin", lambda *args: (begin(*args), shared._take_step()))
    answer = client.http.post(COMPLETIONS, json={"prompt": "abc", "stream": stream, "max_tokens": 1})
    assert (answer.status_code, '"finish_reason": "length"' in answer.text) == (200, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_fails_its_requests_and_no_later_ones(
    stream: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, numbers = client.engine.runner.run, iter(range(99))
    sentence = "ZeroDivisionError: integer division or modulo by zero"
    with monkeypatch.context() as patch:
        patch.setattr(client.engine.runner, "run", lambda packed: run(packed) if next(numbers) < stream else 1 // 0)
        if stream:
            answer = client.http.post(COMPLETIONS, json={"prompt": "abc", "stream": True} | LONG)
            *_, event, last, rest = answer.text.split("\n\n")
            error = json.loads(event.removeprefix("data: "))["error"]
            assert (error["message"], error["type"], last, rest) == (sentence, "server_error", "data: [DONE]", "")
        else:
            assert client.ask(COMPLETIONS, 500, prompt="abc") == sentence
    assert client.ask(COMPLETIONS, prompt="abc")["choices"]


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_ctrl_c_ends_the_server_and_answers_what_runs(
    grace: float, emssd: Callable, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is where Ctrl-C comes."""
    listening, step, interrupted, answers = serve._listening, Engine.step, list[int](), list[Any]()

    def ask(config: ServeConfig) -> socket.socket:
        listener = listening(config)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{COMPLETIONS}"
        asking = threading.Thread(
            target=lambda: answers.append(httpx2.post(url, json={"prompt": "abc"} | LONG, timeout=60))
        )
        asking.start()
        return listener

    def interrupts(self: Engine) -> Any:
        if not interrupted:
            interrupted.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(serve, "_GRACE", grace)
    monkeypatch.setattr(serve, "_listening", ask)
    monkeypatch.setattr(Engine, "step", interrupts)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored, as `&` in a script does
    try:
        result = emssd("serve", chat_model, "port=0", "model.compile=false", "drafter=none")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one would end the process at once
    assert (result.status, result.err.splitlines()[-1]) == (130, "emssd: interrupted")
    assert f"{chat_model} answers at http://127.0.0.1:" in result.err
    (answer,) = answers
    assert answer.status_code == (200 if grace else 503)
    assert grace or "the server is shutting down" in answer.json()["error"]["message"]


@looped(
    "arguments, sentence",
    [
        (["nowhere", "port=70000"], "port is 70000; it must be"),
        (["DIR", "--port", "9000"], "there is no --port; options are written NAME=VALUE, here perhaps port=9000"),
        (["DIR", "check=plain"], "there is no option 'check'"),
        (["DIR", "model.tensor_parallel=true"], "model.tensor_parallel=true is for jobs, and a server is one process"),
        (["DIR", "stop=['']"], "stop holds ''; every stop string is a text of at least one character"),
        (["DIR", "host=nowhere.invalid."], "cannot listen at host=nowhere.invalid. port=0: "),
        (["--multirun", "port=1,2"], "a server has one set of options"),
    ],
)
def test_options_that_a_server_cannot_have(
    arguments: list[str], sentence: str, emssd: Callable, chat_model: str
) -> None:
    words = [chat_model if word == "DIR" else word for word in arguments]
    more = () if "port" in str(words) else ["port=0", "model.compile=false"]
    assert sentence in emssd("serve", *words, *more).sentence


def test_what_a_server_needs_is_named(emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "emssd.cli.serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert emssd("serve").sentence == "emssd serve needs uvicorn: pip install 'emssd[serve]'"


def test_the_help_of_the_server(emssd: Callable) -> None:
    shown = emssd("serve", "--help").out
    assert "port=8000" in shown
    assert "drafter=cascade" in shown
    assert "check=" not in shown
