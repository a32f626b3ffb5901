"""A server on loopback, and what its answers must be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from emssd import Engine
from emssd.cli.config import OnError, SamplingConfig, ServeConfig
from emssd.cli.intake import Failures, to_requests
from emssd.sequences import Generation

pytest.importorskip("starlette", reason="the server is not installed: pip install 'emssd[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'emssd[serve]'")
from emssd.cli import serve  # noqa: E402
from emssd.cli.server import Server  # noqa: E402

ASK = [{"role": "user", "content": "hi"}]
"""The prompt ``<s>[u]hi[a]`` of the chat model."""


class Client:
    """A server and those who ask it."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.engine = server, server.shared.engine
        self.address = "127.0.0.1", port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    def ask(self, url: str, status: int = 200, **body: Any) -> Any:
        """The body of the answer; of one that is none, its sentence."""
        answer = self.http.post(url, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]["message"]


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
    assert not server.shared._watched
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
