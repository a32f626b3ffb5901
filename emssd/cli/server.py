"""The endpoints of ``emssd serve``: OpenAI's API in front of a `SharedEngine`."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from functools import cached_property
from secrets import randbits
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from emssd.cli.output import record_of
from emssd.cli.shared import ClosedError, SharedEngine
from emssd.cli.text_stream import TextStream
from emssd.data.openai import CHAT, COMPLETIONS, answer_to, part_of, prompt_of, refusal
from emssd.data.prompts import Prompt
from emssd.data.typed import read_json
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, PromptError
from emssd.errors.faults import described
from emssd.sequences import Generation, Request, Row
from emssd.sequences.token_bytes import TokenBytes

__all__ = ["Server"]

_LEFT = 499  # the status of an answer that its client has not waited for
_logger = logging.getLogger(__name__)


class Server:
    """Answers requests as they come, all in one batch.

    Args:
        engine: nobody else uses it.
        model: its name in answers.
        requests_of: the requests of a prompt. Raises PromptError or ConfigError: it cannot be decoded.

    Attributes:
        app: the endpoints, as an ASGI application.
    """

    def __init__(self, engine: Engine, model: str, requests_of: Callable[[Prompt], Seq[Request]]) -> None:
        self.shared, self.model, self.requests_of = SharedEngine(engine), model, requests_of
        self.tokenizer = engine.tokenizer
        routes = [Route(url, self._answer, methods=["POST"]) for url in (CHAT, COMPLETIONS)]
        routes += [Route("/v1/models", self._models), Route("/health", lambda _: _json({"status": "ok"}))]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_page})

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token, for log-probabilities."""
        return TokenBytes(self.tokenizer)

    def _models(self, _: HTTPRequest) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "emssd"}
        return _json({"object": "list", "data": [model]})

    async def _answer(self, http: HTTPRequest) -> Response:
        try:
            call = _Call(self, http.url.path, _body_of(await http.body()))
            call.rows = await anext(call.steps)  # now, so that a request that cannot be decoded has a status of its own
            if call.is_streamed:
                return StreamingResponse(call.events(), media_type="text/event-stream")
            async with aclosing(call.steps):
                async for _ in call.steps:
                    if await http.is_disconnected():
                        return Response(status_code=_LEFT)
            return _json(call.answer(await call.records()))
        except Exception as error:
            return _json(*_refused(error))


class _Call:
    """One request while it is decoded, and its `rows` once they are there. Raises PromptError: it cannot be honoured."""

    def __init__(self, server: Server, url: str, body: dict[str, Any]) -> None:
        self.is_streamed, self._has_usage = _stream_options(body.pop("stream", None), body.pop("stream_options", None))
        # All prompts have the same id: what is drawn depends on it and on the seed.
        self.prompt = prompt_of("of the request", "the request", url, {"seed": randbits(31)} | body)
        self.steps = server.shared.decode(self._requests, self._watch if self.is_streamed else None)
        self.rows: Seq[Row] = ()
        self._server, self._streams = server, dict[int, TextStream]()
        self._pieces = deque[tuple[int, str]]()  # texts that are new, and of which choice
        self._origin = {"id": uuid4().hex, "created": int(time.time()), "model": server.model}

    def answer(self, records: Seq[dict[str, Any]]) -> dict[str, Any]:
        """The body of the answer."""
        return answer_to(self.prompt, records, self._origin, lambda: self._server.token_bytes)

    async def records(self) -> list[dict[str, Any]]:
        """The rows, which have finished. Raises PromptError: one has an error."""
        return await self._server.shared.between_steps(self._records)

    async def events(self) -> AsyncIterator[str]:
        """The events of a streamed answer."""
        try:
            for index in range(len(self.rows)):
                yield self._event(index, {"text": "", "finish_reason": None})
            async with aclosing(self.steps):
                while True:
                    while self._pieces:
                        index, text = self._pieces.popleft()
                        yield self._event(index, {"text": text, "finish_reason": None})
                    if await anext(self.steps, None) is None:
                        break
            records = await self.records()
            for index, record in enumerate(records):
                rest = "".join(text for other, text in self._pieces if other == index)
                yield self._event(index, record | {"text": rest})
            if self._has_usage:
                last = part_of(self.prompt, 0, records[0], self._origin, lambda: self._server.token_bytes)
                yield _event(last | {"choices": [], "usage": self.answer(records)["usage"]})
        except Exception as error:
            yield _event(_refused(error)[0])
        yield "data: [DONE]\n\n"

    def _event(self, index: int, record: dict[str, Any]) -> str:
        return _event(part_of(self.prompt, index, record, self._origin, lambda: self._server.token_bytes))

    def _requests(self) -> Seq[Request]:
        return self._server.requests_of(self.prompt)

    def _watch(self, row: Row) -> None:
        index, tokenizer = row.request.sample, self._server.tokenizer
        if index not in self._streams:
            show = lambda text, _: self._pieces.append((index, text))  # noqa: E731
            self._streams[index] = TextStream(tokenizer, row.request.stop, show)
        if not getattr(tokenizer, "clean_up_tokenization_spaces", False):  # which may change a text when more comes
            self._streams[index](row)

    def _records(self) -> list[dict[str, Any]]:
        generations = [Generation.of(row, self._server.tokenizer) for row in self.rows]
        for generation in generations:
            generation.check()
            if self.is_streamed:
                self._streams[generation.sample].end(generation.text or "")
        return [record_of(generation) for generation in generations]


def _body_of(content: bytes) -> dict[str, Any]:
    try:
        body = read_json(content)
    except ValueError as error:
        raise PromptError(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise PromptError(f"the request is of type {type(body).__name__}; it must be an object")
    return {name: value for name, value in body.items() if value is not None}


def _stream_options(stream: Any, options: Any) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether it ends with its usage."""
    if stream not in (None, True, False):
        raise PromptError(f"the request: stream is {stream!r:.60}; it must be true or false")
    has_usage = options.get("include_usage") if isinstance(options, dict) else options
    if has_usage not in (None, True, False) or (isinstance(options, dict) and options.keys() - {"include_usage"}):
        raise PromptError(f"the request: stream_options is {options!r:.60}; it has include_usage, true or false")
    return bool(stream), bool(has_usage)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _refused(error: Exception) -> tuple[dict[str, Any], int]:
    """The body and the status of an answer that is none."""
    if isinstance(error, (PromptError, ConfigError)):
        return refusal(str(error)), 400
    if isinstance(error, ClosedError):
        return refusal(str(error), "server_error"), 503
    _logger.error("a request failed: %s", described(error))
    return refusal(described(error), "server_error"), 500


async def _no_such_page(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answered = f"POST {CHAT}, POST {COMPLETIONS}, GET /v1/models and GET /health"
    return _json(refusal(f"there is no {http.method} {http.url.path}; emssd answers {answered}"), error.status_code)
