"""`data=openai_batch`: requests of OpenAI's Batch API as prompts, and the rows of a run as answers in its format.

Source: the API reference's "The request input object" and "The request output object" of batches, and its pages on
completions and chat completions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Annotated, Any

from emssd.data.chat import check_messages
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.data.records import content_of, records_in
from emssd.data.sources import FileConfig
from emssd.errors import PromptError, did_you_mean
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import PromptSourceSpec, hookimpl

if TYPE_CHECKING:
    from emssd.sequences.token_bytes import TokenBytes

__all__ = ["OpenAIBatchConfig", "emssd_prompt_sources"]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LINE = ("custom_id", "method", "url", "body")

# Fields that are options of `SamplingParams` by the same name.
_SAMPLING = ("temperature", "top_p", "seed", "n", "presence_penalty", "frequency_penalty", "logit_bias")
_BOTH = {"max_tokens", "stop", "logprobs", *_SAMPLING}
_HONOURED = {
    _CHAT: _BOTH | {"messages", "max_completion_tokens", "top_logprobs", "response_format"},
    _COMPLETIONS: _BOTH | {"prompt"},
}
# Fields that have no part in the text of an answer.
_HARMLESS = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction"}
_HARMLESS |= {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
# Fields that would change an answer, with the values beside null that do not; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # how the API writes a log-probability that is none
_Row = dict[str, Any]


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


@hookimpl
def emssd_prompt_sources() -> list[PromptSourceSpec]:
    """Offer the requests of a batch."""
    return [PromptSourceSpec("openai_batch", OpenAIBatchConfig, _prompts, None, "batch_output.jsonl", _answers)]


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
    if url not in (_CHAT, _COMPLETIONS):
        raise PromptError(f"{line}: url is {url!r}; emssd answers {_CHAT} and {_COMPLETIONS}")
    if not isinstance(body, dict):
        raise PromptError(f"{line}: body is of type {type(body).__name__}; it must be an object")
    body = {name: value for name, value in body.items() if value is not None}
    _check_fields(line, url, body)
    sampling = {"temperature": config.temperature} | {name: body[name] for name in _SAMPLING if name in body}
    sampling |= _logprobs(line, url, body) | _grammar(line, body.get("response_format"))
    prompt = Prompt(custom_id, max_new_tokens=_limit(line, body), sampling=sampling, stop=_stop(line, body))
    if url == _CHAT:
        return replace(prompt, messages=_messages(line, body.get("messages")))
    return replace(prompt, **_text_or_ids(line, body.get("prompt")))


def _check_fields(line: str, url: str, body: Mapping[str, Any]) -> None:
    """Refuse what cannot be honoured. Raises PromptError, which names the field."""
    for name, value in body.items():
        if name in _HARMLESS | _HONOURED[url] or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        if name in _NEUTRAL:
            text = str(value) if len(str(value)) <= 60 else f"{value!s:.60}…"
            raise PromptError(f"{line}: emssd cannot honour {name}={text}; leave it out")
        guess = did_you_mean(name, _HONOURED[url]) or "; leave it out"
        raise PromptError(f"{line}: emssd cannot honour {name!r}, which is no option of {url} that it knows{guess}")


def _logprobs(line: str, url: str, body: Mapping[str, Any]) -> dict[str, int]:
    """The option `logprobs` of `SamplingParams`, which chats spread over two fields."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if url == _COMPLETIONS:
        return {} if logprobs is None else {"logprobs": logprobs}
    if logprobs not in (None, True, False):
        raise PromptError(f"{line}: logprobs is {logprobs!r}; for {url} it must be true or false")
    if not logprobs and top is not None:
        raise PromptError(f"{line}: top_logprobs is {top!r} without logprobs=true; add that, or leave it out")
    return {"logprobs": 0 if top is None else top} if logprobs else {}


def _grammar(line: str, form: Any) -> dict[str, Any]:
    """The option `grammar` of `SamplingParams`, of a ``response_format``. A schema is followed, strict or not."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or form == {"type": "text"}:
        return {}
    if kind == "json_object":
        return {"grammar": "json"}
    details = form.get("json_schema") if kind == "json_schema" else None
    if isinstance(details, dict) and isinstance(schema := details.get("schema"), dict):
        return {"grammar": schema}
    raise PromptError(
        f"{line}: response_format is {form!s:.60}; its type is text, json_object, or json_schema with "
        f'{{"json_schema": {{"schema": …}}}}'
    )


def _limit(line: str, body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    for name in names:
        if type(body[name]) is not int or body[name] < 1:
            raise PromptError(f"{line}: {name} is {body[name]!r}; it must be a whole number of at least 1")
    if len({body[name] for name in names}) > 1:
        raise PromptError(f"{line}: max_completion_tokens and max_tokens differ; leave max_tokens out, the older one")
    return body[names[0]] if names else None


def _stop(line: str, body: Mapping[str, Any]) -> tuple[str, ...] | None:
    stop = body.get("stop")
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None or strings == []:
        return None
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise PromptError(f"{line}: stop is {stop!r}; it must be a text, or a list of texts that are not empty")
    return tuple(strings)


def _messages(line: str, messages: Any) -> tuple[Mapping[str, Any], ...]:
    """Messages as chat templates take them, each with one text."""
    if not isinstance(messages, list):
        raise PromptError(f"{line}: messages is of type {type(messages).__name__}; it must be a list of messages")
    plain = [_message(line, number, message) for number, message in enumerate(messages, start=1)]
    return tuple(check_messages(plain, line))


def _message(line: str, number: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message  # which `check_messages` refuses
    message = {name: value for name, value in message.items() if value is not None}
    if unknown := [name for name in message if name not in ("role", "content", "name")]:
        raise PromptError(f"{line}: message {number} has {unknown[0]!r}; emssd takes role, content and name")
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PromptError(f"{line}: message {number} has a part that is no text; emssd reads texts alone")
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _text_or_ids(line: str, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"token_ids": tuple(prompt)}
    if isinstance(prompt, list) and len(prompt) > 1:
        raise PromptError(f"{line}: prompt is a list of {len(prompt)}; write a request for each, with its custom_id")
    raise PromptError(f"{line}: prompt is {prompt!r}; it must be a text, or a list of token ids")


def _answers(
    answered: Iterable[tuple[Prompt, Seq[_Row]]],
    failed: Iterable[FailedPrompt],
    model: str,
    load_tokenizer: Callable[[], Any],
) -> Iterator[str]:
    """A line for each request, first of the `answered` ones. The tokenizer is loaded if a row has log-probabilities."""
    from emssd.sequences.token_bytes import TokenBytes

    origin = {"created": int(time.time()), "model": model}
    token_bytes = cache(lambda: TokenBytes(load_tokenizer()))
    for prompt, rows in answered:
        yield _answer(prompt.prompt_id, 200, _body(prompt, rows, origin, token_bytes))
    for item in failed:
        error = {"message": item.error, "type": "invalid_request_error", "param": None, "code": None}
        yield _answer(item.prompt_id, 400, {"error": error})


def _answer(custom_id: str, status: int, body: Mapping[str, Any]) -> str:
    name = _digest(custom_id)
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return json.dumps({"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None})


def _digest(custom_id: str) -> str:
    """The part of ids that tells requests apart, the same each time."""
    return hashlib.sha256(custom_id.encode(errors="surrogatepass")).hexdigest()[:32]


def _body(prompt: Prompt, rows: Seq[_Row], origin: _Row, token_bytes: Callable[[], TokenBytes]) -> _Row:
    is_chat = prompt.messages is not None
    num_prompt, num_new = rows[0]["num_prompt_tokens"], sum(len(row["token_ids"]) for row in rows)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_digest(prompt.prompt_id)}",
        "object": "chat.completion" if is_chat else "text_completion",
        **origin,
        "choices": [_choice(row, index, token_bytes, is_chat=is_chat) for index, row in enumerate(rows)],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }


def _choice(row: _Row, index: int, token_bytes: Callable[[], TokenBytes], *, is_chat: bool) -> _Row:
    logprobs, text = None, row["text"]
    if (tokens := row.get("logprobs")) is not None:
        logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(tokens, token_bytes())
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": index, **content, "finish_reason": _REASONS[row["finish_reason"]], "logprobs": logprobs}


def _chat_logprobs(tokens: Seq[_Row], token_bytes: TokenBytes) -> _Row:
    def entry(token_id: int, logprob: float | None) -> _Row:
        content = token_bytes(token_id)
        return {"token": _text(content), "logprob": _number(logprob), "bytes": list(content)}

    content = [
        entry(token["token_id"], token["logprob"]) | {"top_logprobs": [entry(*other) for other in token["top"]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Seq[_Row], token_bytes: TokenBytes) -> _Row:
    texts = [_text(token_bytes(token["token_id"])) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [_number(token["logprob"]) for token in tokens],
        "top_logprobs": [
            {_text(token_bytes(other)): _number(logprob) for other, logprob in token["top"]} for token in tokens
        ],
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _number(logprob: float | None) -> float:
    return _LEAST if logprob is None else logprob
