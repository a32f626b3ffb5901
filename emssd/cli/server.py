"""The endpoints of ``emssd serve``: OpenAI's API in front of one engine that all calls share."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from itertools import count
from secrets import randbits
from typing import Any, TypeVar
from uuid import uuid4

from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from emssd.cli.output import record_of
from emssd.cli.text_stream import TextStream
from emssd.data.openai import CHAT, COMPLETIONS, RESPONSES, Answer, prompt_of, refusal
from emssd.data.prompts import Prompt
from emssd.data.responses import Response as ResponseAnswer
from emssd.data.typed import read_json, typed
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, EmssdError, PromptError
from emssd.errors.faults import described
from emssd.sequences import Generation, Request, Row
from emssd.sequences.token_bytes import TokenBytes

__all__ = ["Server"]

_LEFT = 499  # the status of an answer that its client has not waited for
_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Watch = Callable[[Row], None]


class SharedEngine:
    """Decodes the rows of all calls in one batch. A thread of its own does all that touches the engine, in order.

    So rows are added, and given up, between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._step: asyncio.Future[None] | None = None  # the latest
        self._watched = dict[int, tuple[list[Row], _Watch]]()
        self._names, self._is_closed = count(), False

    def close(self) -> None:
        """Let all calls end with an error after this step."""
        self._is_closed = True

    async def between_steps(self, do: Callable[[], _Result]) -> _Result:
        """The result of `do`, which may touch the engine and its tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    async def decode(self, requests: Callable[[], Iterable[Request]], watch: _Watch) -> AsyncGenerator[list[Row], None]:
        """Decode the samples that `requests` gives between two steps; yields their rows once they are queued and after
        each step, until all have finished. To close the iterator gives them up.

        Args:
            watch: gets each row after each step, in the engine's thread, to be read only.

        Raises:
            EmssdError: the requests cannot be decoded, or `close` was called.
            Exception: what kept a step from being done. It ends all calls that took part in it.
        """
        rows: list[Row] = []
        try:
            await self.between_steps(lambda: self._begin(rows, requests(), watch))
            yield rows  # steps of other calls may finish them before this call goes on
            while any(row.finish_reason is None for row in rows):
                if self._is_closed:
                    raise EmssdError("the server is shutting down; ask again when it is back")
                if self._step is None or self._step.done():
                    self._step = asyncio.ensure_future(self.between_steps(self._take_step))
                await asyncio.shield(self._step)
                yield rows
        finally:
            self._thread.submit(self._end, rows)

    def _begin(self, rows: list[Row], requests: Iterable[Request], watch: _Watch) -> None:
        """Queue the rows. Each is sampled as if `Engine.generate` had its prompt alone."""
        self._watched[id(rows)] = rows, watch
        for request in requests:
            rows += self.engine.add(replace(request, request_id=str(next(self._names)), sample_of="0"))

    def _take_step(self) -> None:
        self.engine.step_in_memory()
        for rows, watch in self._watched.values():
            for row in rows:
                watch(row)

    def _end(self, rows: list[Row]) -> None:
        self._watched.pop(id(rows), None)
        if names := [row.request_id for row in rows if row.finish_reason is None]:
            self.engine.clear(names)


class _StreamFields(Struct, frozen=True):
    include_usage: bool = False


class _Streaming(Struct):
    stream: bool | None = None
    stream_options: _StreamFields | None = None


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
        self.tokenizer, self.token_bytes = engine.tokenizer, cache(lambda: TokenBytes(engine.tokenizer))
        routes = [Route(url, self._answer, methods=["POST"]) for url in (CHAT, COMPLETIONS, RESPONSES)]
        routes += [Route("/v1/models", self._models), Route("/health", lambda _: _json({"status": "ok"}))]
        self.app = Starlette(routes=routes)

    def _models(self, _: HTTPRequest) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "emssd"}
        return _json({"object": "list", "data": [model]})

    async def _answer(self, http: HTTPRequest) -> Response:
        try:
            call = _Call(self, http.url.path, await http.body())
            call.rows = await anext(call.steps)  # now, so that a request that cannot be decoded has a status of its own
            if call.is_streamed:
                return _Stream(call)
            async with aclosing(call.steps):
                async for _ in call.steps:
                    if await http.is_disconnected():
                        return Response(status_code=_LEFT)
            return _json(call.answer.whole(await call.records()))
        except ClientDisconnect:
            return Response(status_code=_LEFT)
        except Exception as error:
            return _json(*_refused(error))


class _Call:
    """One request while it is decoded, and its `rows` once they are there. Raises PromptError: it cannot be read."""

    def __init__(self, server: Server, url: str, content: bytes) -> None:
        try:
            fields = read_json(content)
            options = typed(fields, _Streaming)
        except ValueError as error:
            raise PromptError(f"the request cannot be read: {error}") from error
        self.is_streamed = options.stream
        more = options.stream_options
        self._has_usage = url != RESPONSES and more is not None and more.include_usage
        read = ("stream", "stream_options")
        body = {name: value for name, value in fields.items() if value is not None and name not in read}
        body.setdefault("seed", randbits(31))
        self.prompt = prompt_of("of the request", "the request", url, body)
        self.steps = server.shared.decode(lambda: server.requests_of(self.prompt), self._watch)
        self.rows: Seq[Row] = ()
        self._server, self._streams = server, dict[int, TextStream]()
        self._pieces = deque[tuple[int, str]]()  # texts that are new, and of which choice
        origin = {"id": uuid4().hex, "created": int(time.time()), "model": server.model}
        is_response = url == RESPONSES
        self.answer = ResponseAnswer(origin) if is_response else Answer(self.prompt, origin, server.token_bytes)

    async def records(self) -> list[dict[str, Any]]:
        """The rows, which have finished. Raises PromptError: one has an error."""
        return await self._server.shared.between_steps(self._records)

    async def events(self) -> AsyncIterator[str]:
        """The events of a streamed answer."""
        try:
            for index in range(len(self.rows)):
                yield self._events(index, "")
            is_going_on = True
            while is_going_on:
                while self._pieces:
                    yield self._events(*self._pieces.popleft())
                is_going_on = await anext(self.steps, None) is not None
            records = await self.records()
            for index, record in enumerate(records):
                rest = "".join(text for other, text in self._pieces if other == index)
                yield self._events(index, rest, record)
            if self._has_usage:
                whole = self.answer.whole(records)
                (part,) = self.answer.parts(0, "")
                yield _event(part | {"choices": [], "usage": whole["usage"]})
        except Exception as error:
            yield _event(_refused(error)[0])
        yield "data: [DONE]\n\n"

    def _events(self, index: int, text: str, record: dict[str, Any] | None = None) -> str:
        return "".join(map(_event, self.answer.parts(index, text, record)))

    def _watch(self, row: Row) -> None:
        index, tokenizer = row.request.sample, self._server.tokenizer
        if not self.is_streamed:
            return
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


class _Stream(StreamingResponse):
    """The events of a call; however the answer ends, the rows of the call are given up."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call.events(), media_type="text/event-stream")
        self._steps = call.steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._steps):
            await super().__call__(scope, receive, send)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _refused(error: Exception) -> tuple[dict[str, Any], int]:
    """The body and the status of an answer that is none."""
    if isinstance(error, (PromptError, ConfigError)):
        return refusal(str(error)), 400
    _logger.error("a request failed: %s", described(error))
    message = str(error) if isinstance(error, EmssdError) else described(error)
    return refusal(message, "server_error"), 503 if isinstance(error, EmssdError) else 500
