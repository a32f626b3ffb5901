"""`data=openai_batch`: requests of OpenAI's Batch API as prompts, and the rows of a run as answers in its format.

Source: the API reference's "The request input object" and "The request output object" of batches.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Annotated, Any

from emssd.data.openai import CHAT, COMPLETIONS, Answer, prompt_of, refusal
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.data.records import content_of, records_in
from emssd.data.sources import FileConfig
from emssd.errors import PromptError
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import PromptSourceSpec, offering

__all__ = ["OpenAIBatchConfig", "emssd_prompt_sources"]

_LINE = ("custom_id", "method", "url", "body")


@dataclass
class OpenAIBatchConfig(FileConfig):
    """`data=openai_batch`: requests of OpenAI's Batch API, for ``/v1/chat/completions`` and ``/v1/completions``.

    Beside its other files, the run writes ``batch_output.jsonl``, the answers in that API's format.

    Attributes:
        limit: use only this many requests.
        temperature: of requests that name none; 1 is the API's default.
    """

    limit: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0


def _prompts(config: OpenAIBatchConfig) -> list[Prompt | FailedPrompt]:
    """The prompts of `data=openai_batch`. A wrong request fails alone; without a ``custom_id``, its line names it."""
    name, content = content_of(config.path)
    prompts: list[Prompt | FailedPrompt] = []
    taken: dict[str, str] = {}  # the line of each custom_id
    for item in islice(records_in(name, content), config.limit):
        if isinstance(item, FailedPrompt):
            prompts.append(item)
            continue
        line, request = item
        custom_id = request.get("custom_id")
        prompt_id = custom_id if isinstance(custom_id, str) and custom_id not in taken else line
        try:
            prompts.append(_prompt(line, request, taken, config))
        except PromptError as error:
            prompts.append(FailedPrompt(prompt_id, str(error)))
        if isinstance(custom_id, str):
            taken.setdefault(custom_id, line)
    if not prompts:
        raise PromptError(f"{name} holds no requests: it is empty")
    return prompts


def _prompt(line: str, request: dict[str, Any], taken: Mapping[str, str], config: OpenAIBatchConfig) -> Prompt:
    if unknown := [name for name in request if name not in _LINE]:
        raise PromptError(f"{line} has a field {unknown[0]!r}; a request has {', '.join(_LINE)}")
    custom_id, method, url, body = (request.get(name) for name in _LINE)
    if not isinstance(custom_id, str) or not custom_id:
        raise PromptError(f"{line} has no text custom_id; give each request one of its own")
    if custom_id in taken:
        raise PromptError(f"{line} has the custom_id {custom_id!r} of {taken[custom_id]}; give it one of its own")
    if method != "POST":
        raise PromptError(f"{line}: method is {method!r}; it must be 'POST'")
    if url not in (CHAT, COMPLETIONS):
        raise PromptError(f"{line}: url is {url!r}; emssd answers {CHAT} and {COMPLETIONS}")
    if not isinstance(body, dict):
        raise PromptError(f"{line}: body is of type {type(body).__name__}; it must be an object")
    prompt = prompt_of(custom_id, line, url, body)
    return replace(prompt, sampling={"temperature": config.temperature} | dict(prompt.sampling or {}))


def _answers(
    answered: Iterable[tuple[Prompt, Seq[dict[str, Any]]]],
    failed: Iterable[FailedPrompt],
    model: str,
    load_tokenizer: Callable[[], Any],
) -> Iterator[str]:
    """A line for each request, first of the `answered` ones. The tokenizer is loaded if a row has log-probabilities."""
    from emssd.sequences.token_bytes import TokenBytes

    origin = {"created": int(time.time()), "model": model}
    token_bytes = cache(lambda: TokenBytes(load_tokenizer()))
    for prompt, rows in answered:
        identity = {"id": _digest(prompt.prompt_id)}
        yield _answer(prompt.prompt_id, 200, Answer(prompt, origin | identity, token_bytes).whole(rows))
    for item in failed:
        yield _answer(item.prompt_id, 400, refusal(item.error))


def _answer(custom_id: str, status: int, body: Mapping[str, Any]) -> str:
    name = _digest(custom_id)
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return json.dumps({"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None})


def _digest(custom_id: str) -> str:
    """The part of ids that tells requests apart, the same each time."""
    return hashlib.sha256(custom_id.encode(errors="surrogatepass")).hexdigest()[:32]


emssd_prompt_sources = offering(
    PromptSourceSpec("openai_batch", OpenAIBatchConfig, _prompts, None, "batch_output.jsonl", _answers)
)
