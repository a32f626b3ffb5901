"""64 clients of ``emssd serve`` for five minutes, or ``EMSSD_CLIENTS_SECONDS``, of which some leave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import httpx2
import psutil
import pytest

from emssd import SamplingParams
from emssd.data.openai import COMPLETIONS

from .serving import alone, serving

__all__ = ["alone"]  # a fixture
SECONDS = float(os.environ.get("EMSSD_CLIENTS_SECONDS", "300"))
Ask = tuple[dict[str, Any], list[str]]  # the body of a request, and the texts of its choices


def asks(alone: Callable) -> list[Ask]:
    draw, made = random.Random(0), list[Ask]()
    for number in range(48):
        text, limit = "".join(draw.choices("abc ", k=draw.randrange(1, 40))), draw.randrange(1, 50)
        options = {"n": draw.choice((1, 3)), "temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        stop = draw.choice([[], ["e"], ["T", "*"]])
        rows = alone(text, limit, stop=stop, sampling=SamplingParams(**options) if number % 2 else None)
        body = {"prompt": text, "max_tokens": limit, "stop": stop, "stream": draw.random() < 0.5} | options
        made.append((body, [row.text or "" for row in rows]))
    return made


async def answered(http: httpx2.AsyncClient, body: dict[str, Any], wanted: list[str], draw: random.Random) -> bool:
    """Whether the whole answer came, which is the right one; the client may leave within a stream."""
    leaves, texts = draw.random() < 0.3, [""] * len(wanted)
    async with http.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if leaves and draw.random() < 0.3:
                return False
            if line and line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == wanted
    return True


async def ask_until(end: float, url: str, made: list[Ask], number: int) -> int:
    """The number of whole answers that a client gets until `end`. Now and then it leaves whenever."""
    draw, num_answers = random.Random(number), 0
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < end:
            asking = asyncio.create_task(answered(http, *draw.choice(made), draw))
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() / 10)
                asking.cancel()
            await asyncio.wait([asking])
            num_answers += not asking.cancelled() and asking.result()
    return num_answers


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
def test_whoever_stays_gets_the_text_of_the_prompt_alone_and_nothing_is_left_of_others(
    chat_model: str, alone: Callable
) -> None:
    made, memory = asks(alone), list[int]()

    async def ask(url: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        assert all(await asyncio.gather(*(ask_until(end, url, made, number) for number in range(64))))

    with serving(chat_model, batch_size=16, kv_memory="4MiB") as client:
        for seconds in (SECONDS / 5, SECONDS * 4 / 5):
            asyncio.run(ask(client.url, seconds))
            client.ask(COMPLETIONS, prompt="x", max_tokens=1)
            assert not client.server.shared._watched
            memory.append(psutil.Process().memory_info().rss)
        assert memory[1] - memory[0] < 2**25, memory
