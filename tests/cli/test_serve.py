"""``emssd serve``: clients on loopback get what the library gives for their prompts, and each its own errors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
import pytest

from emssd import Engine, SamplingParams
from emssd.cli.config import OnError, SamplingConfig, ServeConfig
from emssd.cli.intake import Failures, to_requests
from emssd.sequences import Generation
from tests.support.tiers import few, looped

from .test_request_fuzz import line_of, openai

pytest.importorskip("starlette", reason="the server is not installed: pip install 'emssd[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'emssd[serve]'")
from emssd.cli import serve  # noqa: E402
from emssd.cli.server import Server  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "hi"}]
ROUNDS = 250  # of each client in a night, some five minutes
LONG = {"max_tokens": 80, "temperature": 0, "logit_bias": {"2": -1e9}}  # without EOS


class Client:
    """A server and those who ask it."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.engine = server, server.shared.engine
        self.address = "127.0.0.1", port
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def ask(self, url: str, status: int = 200, **body: Any) -> Any:
        """The body of the answer; of one that is none, its sentence."""
        answer = self.http.post(url, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]["message"]

    def events(self, url: str, **body: Any) -> list[Any]:
        """The events of a streamed answer, but for the mark of its end."""
        answer = self.http.post(url, json=body | {"stream": True})
        *events, last, rest = answer.text.split("\n\n")
        assert (answer.status_code, last, rest) == (200, "data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(model: str, **options: Any) -> Iterator[Client]:
    engine = Engine.from_pretrained(model, **{"compile": False, "batch_size": 3} | options)
    config = ServeConfig(max_new_tokens=6, sampling=SamplingConfig(temperature=1.0))
    server = Server(engine, "tiny", lambda prompt: to_requests(config, engine, [prompt], Failures(OnError.fail)))
    listener = socket.create_server(("127.0.0.1", 0))
    runs = serve._Uvicorn(uvicorn.Config(server.app, lifespan="off", ws="none", log_config=None), server)
    thread = threading.Thread(target=runs.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Client(server, listener.getsockname()[1])
    finally:
        runs.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
    assert not engine.has_work
    assert engine.runner.usage.held == 0


@pytest.fixture(scope="module")
def client(chat_model: str) -> Iterator[Client]:
    with serving(chat_model) as client:
        yield client


@pytest.fixture(scope="module")
def alone(chat_model: str) -> Callable[..., list[Generation]]:
    """The library's answer to one prompt."""
    engine = Engine.from_pretrained(chat_model, compile=False, drafter="none", batch_size=1)
    return lambda text, limit=6, **options: engine.generate([engine.tokenizer(text)["input_ids"]], limit, **options)


def test_a_chat_is_answered_through_its_template(client: Client, alone: Callable) -> None:
    answer = client.ask(CHAT, model="any", messages=ASK, temperature=0, max_completion_tokens=5)
    (wanted,) = alone("<s>[u]hi[a]", 5)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


def test_texts_follow_the_options_of_their_request_and_streams_bring_the_same(client: Client, alone: Callable) -> None:
    body = {"prompt": "abc", "n": 3, "seed": 7, "temperature": 0.9, "top_k": 40, "max_tokens": 30, "stop": ["e", "T"]}
    sampling = SamplingParams(n=3, seed=7, temperature=0.9, top_k=40)
    wanted = alone("abc", 30, sampling=sampling, stop=["e", "T"])
    reasons = [{"eos": "stop"}.get(row.finish_reason.value, row.finish_reason.value) for row in wanted]
    assert "stop" in reasons
    choices = client.ask(COMPLETIONS, **body, logprobs=0)["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        (row.text, reason) for row, reason in zip(wanted, reasons, strict=True)
    ]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(row.token_ids) for row in wanted]
    *events, usage = client.events(COMPLETIONS, **body, stream_options={"include_usage": True})
    texts, ends = dict.fromkeys(range(3), ""), {}
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in ends
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"]
    assert [*texts.values()] == [row.text for row in wanted]
    assert [ends[index] for index in range(3)] == reasons
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], sum(len(row.token_ids) for row in wanted))


def test_the_parts_of_a_streamed_chat(client: Client, alone: Callable) -> None:
    first, *parts = client.events(CHAT, messages=ASK, temperature=0, max_tokens=20)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    assert len({part["id"] for part in (first, *parts)}) == 1
    assert len(parts) > 1
    text = "".join(part["choices"][0]["delta"].pop("content") for part in parts)
    assert text == alone("<s>[u]hi[a]", 20)[0].text
    assert not any(part["choices"][0]["delta"] for part in parts)


def test_an_answer_has_the_form_of_its_schema(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.ask(CHAT, messages=ASK, response_format=form, max_tokens=60, seed=1)
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (True, False)


def test_a_seed_repeats_an_answer_and_without_one_it_is_another(client: Client) -> None:
    def texts(**body: Any) -> set[str]:
        answers = (client.ask(COMPLETIONS, prompt="abc", max_tokens=12, **body) for _ in range(2))
        return {answer["choices"][0]["text"] for answer in answers}

    assert len(texts(seed=3)) == 1
    assert len(texts()) == len(texts(seed=None)) == 2


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
        (CHAT, {}, "the request: messages is of type NoneType; it must be a list of messages"),
        (CHAT, {"messages": []}, "prompt the request is no list of messages"),
        (CHAT, {"messages": ASK, "tools": [1]}, "the request: emssd cannot honour tools=[1]; leave it out"),
        (CHAT, {"messages": ASK, "temperatur": 1}, "did you mean 'temperature'?"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}], "stream": True}, "chat template refuses"),
        (COMPLETIONS, {"prompt": "x" * 200}, "prompt of the request has 200 tokens, and the model takes 96"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1, "stream": True}, "of the request: sampling.temperature is"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "sampling.n is 2 at temperature 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "the request: max_tokens is 0; it must be a whole number"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "text"}}, "emssd cannot honour 'response_format'"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_honoured_is_answered_with_the_reason(
    url: str, body: Any, sentence: str, client: Client
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.http.post(url, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize(("seed", "number"), few([(0, 12), (1, 2000)], ci=1))
def test_whatever_a_request_holds_is_its_own_fault(seed: int, number: int, client: Client) -> None:
    draw = random.Random(seed)
    for index in range(number):
        line = openai(draw, index)
        url = line["url"] if line["url"] in (CHAT, COMPLETIONS) else CHAT
        answer = client.http.post(url, content=line_of(line["body"], draw))
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
    step, before = client.engine.step, client.engine.report.num_new_tokens
    body = json.dumps({"prompt": "abc", "stream": stream} | LONG).encode()
    asking = socket.create_connection(client.address)

    def leaves() -> Any:
        asking.close()
        return step()

    monkeypatch.setattr(client.engine, "step", leaves)
    asking.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    for _ in range(3):
        client.ask(COMPLETIONS, prompt="x", max_tokens=1)
    assert not client.engine.has_work
    assert not client.server.shared._watched
    assert 3 < client.engine.report.num_new_tokens - before < 80


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_fails_its_requests_and_no_later_ones(
    stream: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, numbers = client.engine.runner.run, iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(client.engine.runner, "run", lambda packed: run(packed) if next(numbers) < stream else 1 // 0)
        if stream:
            *_, event = client.events(COMPLETIONS, prompt="abc", **LONG)
            assert event == {"error": {"message": "ZeroDivisionError: integer division or modulo by zero",
                                       "type": "server_error", "param": None, "code": None}}  # fmt: skip
        else:
            assert client.ask(COMPLETIONS, 500, prompt="abc") == "ZeroDivisionError: integer division or modulo by zero"
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


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_clients_of_which_some_leave(chat_model: str, alone: Callable) -> None:
    """Whoever stays gets the text of the prompt alone; nothing is left of those who do not."""
    draw, bodies = random.Random(0), list[tuple[dict[str, Any], list[str]]]()
    for number in range(48):
        text, limit, seed = "".join(draw.choices("abc ", k=draw.randrange(1, 40))), draw.randrange(1, 50), number
        options = {"n": draw.choice((1, 3)), "temperature": 0.8, "seed": seed} if number % 2 else {"temperature": 0}
        stop = draw.choice([[], ["e"], ["T", "*"]])
        rows = alone(text, limit, stop=stop, sampling=SamplingParams(**options) if number % 2 else None)
        body = {"prompt": text, "max_tokens": limit, "stop": stop, "stream": draw.random() < 0.5} | options
        bodies.append((body, [row.text or "" for row in rows]))

    async def ask(http: httpx2.AsyncClient, choices: random.Random) -> bool:
        body, wanted = choices.choice(bodies)
        leaves, texts = choices.random() < 0.3, [""] * len(wanted)
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            events = answer.aiter_lines() if body["stream"] else aiter_one(await answer.aread())
            async for line in events:
                if leaves and choices.random() < 0.3:
                    return False
                if line and line != "data: [DONE]":
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        texts[choice["index"]] += choice["text"]
        assert texts == wanted
        return True

    async def aiter_one(content: bytes) -> AsyncIterator[str]:
        yield content.decode()

    async def client_of(url: str, number: int, num_rounds: int) -> int:
        choices, num_answers = random.Random(number), 0
        async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
            for _ in range(num_rounds):
                if choices.random() < 0.2:  # it leaves whenever
                    asking = asyncio.create_task(ask(http, choices))
                    await asyncio.sleep(choices.random() / 10)
                    asking.cancel()
                    num_answers += (await asyncio.gather(asking, return_exceptions=True)) == [True]
                else:
                    num_answers += await ask(http, choices)
        return num_answers

    async def clients(url: str, num_rounds: int) -> int:
        return sum(await asyncio.gather(*(client_of(url, number, num_rounds) for number in range(64))))

    with serving(chat_model, batch_size=16, kv_memory="4MiB") as client:
        memory = list[int]()
        for num_rounds in (ROUNDS // 5, ROUNDS):
            assert asyncio.run(clients(str(client.http.base_url), num_rounds)) > 32 * num_rounds
            client.ask(COMPLETIONS, prompt="x", max_tokens=1)
            assert not client.server.shared._watched
            memory.append(psutil.Process().memory_info().rss)
        assert memory[1] - memory[0] < 2**25, memory
