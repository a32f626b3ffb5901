"""`TextGenerator`: an actor of Ray Data's ``Dataset.map_batches`` with an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from emssd.data.chat import encode_chat
from emssd.data.prompts import encode_text
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request, Row, StopStrings

__all__ = ["TextGenerator"]

_ADDED = ("generated_text", "generated_token_ids", "finish_reason")


class TextGenerator:
    """Adds ``generated_text``, ``generated_token_ids`` and ``finish_reason`` to batches with a column of prompts.

    An actor's engine decodes the rows of all batches that it has at a time together. Its batch stays full from one
    block to the next with ``ActorPoolStrategy(…, max_concurrent_calls_per_actor=2)``. What a row gets depends on the
    row alone, not on the actor or on the rows beside it.

    Args:
        path: of the model; as in `Engine.from_pretrained`.
        prompt_column: texts, lists of token ids, or lists of messages ``{"role": …, "content": …}``.
        id_column: tells rows apart where `sampling` draws: equal prompts with other ids get other texts.
        max_new_tokens, stop, ignore_eos, sampling: as in `Engine.stream`; ``sampling.n`` is 1.
        options: of `Engine.from_pretrained`, such as ``drafter="suffix"`` and ``batch_size=16``.
    """

    def __init__(
        self,
        path: str = "demo",
        *,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        max_new_tokens: int = 128,
        stop: Seq[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        if sampling is not None and sampling.n > 1:
            raise ConfigError(f"sampling.n is {sampling.n}, and a row has one text; repeat rows, with ids of their own")
        if sampling is not None and sampling.temperature and id_column is None:
            raise ConfigError("sampling draws texts by the id of a row; name the column with id_column=")
        self.engine = engine = Engine.from_pretrained(path, **options)
        self._ids, self._thread = count(), ThreadPoolExecutor(max_workers=1)
        self._columns, self._limit, self._sampling = (prompt_column, id_column), max_new_tokens, sampling
        self._stop = StopStrings(stop, engine.tokenizer) if stop else None
        self._eos = frozenset[int]() if ignore_eos else engine.eos_token_ids

    async def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """One batch in Ray Data's default format, numpy."""
        prompt_column, id_column = self._columns
        for name in filter(None, self._columns):
            if name not in batch:
                raise ConfigError(f"there is no column {name!r}; the columns are {', '.join(batch)}")
        if taken := [name for name in _ADDED if name in batch]:
            raise ConfigError(f"the column {taken[0]!r} is there already; rename it or drop it")
        prompts = batch[prompt_column]
        names = map(str, range(len(prompts)) if id_column is None else batch[id_column])
        rows = await self._decoded([self._request(prompt, name) for prompt, name in zip(prompts, names, strict=True)])
        token_ids = np.empty(len(rows), dtype=object)  # rows of equal length would become a matrix
        token_ids[:] = [np.array(row.token_ids, dtype=np.int64) for row in rows]
        reasons = np.array([row.finish_reason.value for row in rows])
        texts = np.array([row.text for row in rows], dtype=object)
        return batch | dict(zip(_ADDED, (texts, token_ids, reasons), strict=True))

    async def _decoded(self, requests: Iterable[Request]) -> list[Generation]:
        """The generations of `requests`. Calls share the engine's batch, and take turns at its steps.

        Raises what kept one of these rows from being decoded; then all of them are given up.
        """
        in_turn, rows = partial(asyncio.get_running_loop().run_in_executor, self._thread), list[Row]()
        try:
            await in_turn(self._add, rows, requests)
            while any(row.finish_reason is None for row in rows):
                await in_turn(self.engine.step_in_memory)
        finally:
            await in_turn(self.engine.clear, [row.request_id for row in rows if row.finish_reason is None])
        generations = [Generation.of(row, self.engine.tokenizer) for row in rows]
        for generation in generations:
            generation.check()
        return generations

    def _add(self, rows: list[Row], requests: Iterable[Request]) -> None:
        """Queue the requests. What they draw depends on their own names."""
        for request in requests:
            rows += self.engine.add(replace(request, request_id=str(next(self._ids)), sample_of=request.request_id))

    def _request(self, prompt: Any, name: str) -> Request:
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            ids = encode_text(prompt, tokenizer, name)
        elif len(prompt) and isinstance(prompt[0], dict):
            ids = encode_chat(list(prompt), tokenizer, name)
        else:
            ids = [int(token) for token in prompt]
        return Request(name, tuple(ids), self._limit, self._eos, self._stop, self._sampling)
