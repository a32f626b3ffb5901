"""Prompts from a file of OpenAI's Batch API: a request per line, with options of its own.

Source: the API reference's "The request input object" of batches, and its pages on completions and chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

from emssd.data.chat import check_messages
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.data.records import content_of, records_in
from emssd.data.sources import FileConfig
from emssd.errors import PromptError, did_you_mean
from emssd.errors.ranges import AtLeastOne, Meta

__all__ = ["OpenAIBatchConfig", "openai_batch_prompts"]

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


def openai_batch_prompts(config: OpenAIBatchConfig) -> list[Prompt | FailedPrompt]:
    """The prompts of `data=openai_batch`. What is wrong with a request makes that one fail, and no other.

    A line that has no ``custom_id`` is named by its place.
    """
    name, content = content_of(config.path)
    prompts: list[Prompt | FailedPrompt] = []
    taken: dict[str, str] = {}  # the place of each custom_id
    for item in islice(records_in(name, content), config.limit):
        if isinstance(item, FailedPrompt):
            prompts.append(item)
            continue
        place, line = item
        custom_id = line.get("custom_id")
        named = custom_id if isinstance(custom_id, str) and custom_id not in taken else place
        try:
            prompts.append(_prompt(place, line, taken, config))
        except PromptError as error:
            prompts.append(FailedPrompt(named, str(error)))
        if isinstance(custom_id, str):
            taken.setdefault(custom_id, place)
    if not prompts:
        raise PromptError(f"{name} holds no requests: it is empty")
    return prompts


def _prompt(place: str, line: dict[str, Any], taken: Mapping[str, str], config: OpenAIBatchConfig) -> Prompt:
    if unknown := [name for name in line if name not in _LINE]:
        raise PromptError(f"{place} has a field {unknown[0]!r}; a request has {', '.join(_LINE)}")
    custom_id, method, url, body = (line.get(name) for name in _LINE)
    if not isinstance(custom_id, str) or not custom_id:
        raise PromptError(f"{place} has no text custom_id; give each request one of its own")
    if custom_id in taken:
        raise PromptError(f"{place} has the custom_id {custom_id!r} of {taken[custom_id]}; give it one of its own")
    if method != "POST":
        raise PromptError(f"{place}: method is {method!r}; it must be 'POST'")
    if url not in (_CHAT, _COMPLETIONS):
        raise PromptError(f"{place}: url is {url!r}; emssd answers {_CHAT} and {_COMPLETIONS}")
    if not isinstance(body, dict):
        raise PromptError(f"{place}: body is of type {type(body).__name__}; it must be an object")
    body = {name: value for name, value in body.items() if value is not None}
    _check_fields(place, url, body)
    sampling = {"temperature": config.temperature} | {name: body[name] for name in _SAMPLING if name in body}
    sampling |= _logprobs(place, url, body) | _grammar(place, body.get("response_format"))
    prompt = Prompt(custom_id, max_new_tokens=_limit(place, body), sampling=sampling, stop=_stop(place, body))
    if url == _CHAT:
        return replace(prompt, messages=_messages(place, body.get("messages")))
    return replace(prompt, **_text_or_ids(place, body.get("prompt")))


def _check_fields(place: str, url: str, body: Mapping[str, Any]) -> None:
    """Refuse what cannot be honoured. Raises PromptError, which names the field."""
    for name, value in body.items():
        if name in _HARMLESS | _HONOURED[url] or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        if name in _NEUTRAL:
            said = str(value)
            what = said if len(said) <= 60 else f"{said[:60]}…"
            raise PromptError(f"{place}: emssd cannot honour {name}={what}; leave it out")
        guess = did_you_mean(name, _HONOURED[url]) or "; leave it out"
        raise PromptError(f"{place}: emssd cannot honour {name!r}, which is no option of {url} that it knows{guess}")


def _logprobs(place: str, url: str, body: Mapping[str, Any]) -> dict[str, int]:
    """The option `logprobs` of `SamplingParams`, which for chats is spread over two fields."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if url == _COMPLETIONS:
        return {} if asked is None else {"logprobs": asked}
    if asked not in (None, True, False):
        raise PromptError(f"{place}: logprobs is {asked!r}; for {url} it must be true or false")
    if not asked and top is not None:
        raise PromptError(f"{place}: top_logprobs is {top!r} without logprobs=true; add that, or leave it out")
    return {"logprobs": 0 if top is None else top} if asked else {}


def _grammar(place: str, form: Any) -> dict[str, Any]:
    """The option `grammar` of `SamplingParams`, of a ``response_format``. A schema is followed, strict or not."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or form == {"type": "text"}:
        return {}
    if kind == "json_object":
        return {"grammar": "json"}
    about = form.get("json_schema") if kind == "json_schema" else None
    if isinstance(about, dict) and isinstance(schema := about.get("schema"), dict):
        return {"grammar": schema}
    raise PromptError(
        f"{place}: response_format is {form!s:.60}; its type is text, json_object, or json_schema with "
        f'{{"json_schema": {{"schema": …}}}}'
    )


def _limit(place: str, body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    for name in names:
        if type(body[name]) is not int or body[name] < 1:
            raise PromptError(f"{place}: {name} is {body[name]!r}; it must be a whole number of at least 1")
    if len({body[name] for name in names}) > 1:
        raise PromptError(f"{place}: max_completion_tokens and max_tokens differ; leave max_tokens out, the older one")
    return body[names[0]] if names else None


def _stop(place: str, body: Mapping[str, Any]) -> tuple[str, ...] | None:
    stop = body.get("stop")
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None or strings == []:
        return None
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise PromptError(f"{place}: stop is {stop!r}; it must be a text, or a list of texts that are not empty")
    return tuple(strings)


def _messages(place: str, messages: Any) -> tuple[Mapping[str, Any], ...]:
    """Messages as chat templates take them: the content of each is one text."""
    if not isinstance(messages, list):
        raise PromptError(f"{place}: messages is of type {type(messages).__name__}; it must be a list of messages")
    plain = [_message(place, number, message) for number, message in enumerate(messages, start=1)]
    return tuple(check_messages(plain, place))


def _message(place: str, number: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message  # which `check_messages` refuses
    message = {name: value for name, value in message.items() if value is not None}
    if others := [name for name in message if name not in ("role", "content", "name")]:
        raise PromptError(f"{place}: message {number} has {others[0]!r}; emssd takes role, content and name")
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PromptError(f"{place}: message {number} has a part that is no text; emssd reads texts alone")
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _text_or_ids(place: str, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"token_ids": tuple(prompt)}
    if isinstance(prompt, list) and len(prompt) > 1:
        raise PromptError(f"{place}: prompt is a list of {len(prompt)}; write a request for each, with its custom_id")
    raise PromptError(f"{place}: prompt is {prompt!r}; it must be a text, or a list of token ids")
