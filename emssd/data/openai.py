"""Requests of OpenAI's API as prompts, and rows as answers, for batch files and for a server.

Source: the API reference's pages on completions, chat completions and their streams. `emssd.data.responses` has
``/v1/responses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from emssd.data.chat import check_messages
from emssd.data.prompts import Prompt
from emssd.data.responses import RESPONSES, format_of, messages_of
from emssd.errors import PromptError, did_you_mean

__all__ = ["CHAT", "COMPLETIONS", "RESPONSES", "Answer", "prompt_of", "refusal"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields that are options of `SamplingParams` by the same name.
_SAMPLING = {"temperature", "top_p", "seed", "n", "presence_penalty", "frequency_penalty", "logit_bias"}
_SAMPLING |= {"top_k", "min_p", "repetition_penalty"}  # which servers of open models know as well
_BOTH = {"max_tokens", "stop", "logprobs"} | _SAMPLING
_HONOURED = {
    CHAT: _BOTH | {"messages", "max_completion_tokens", "top_logprobs", "response_format"},
    COMPLETIONS: _BOTH | {"prompt"},
    RESPONSES: _SAMPLING - {"n"} | {"input", "instructions", "max_output_tokens", "stop", "text"},
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
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
}

_FORM = "response_format"
_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # how the API writes a log-probability that is none
_Row = dict[str, Any]
_MakeTokenBytes = Callable[[], Callable[[int], bytes]]


def prompt_of(prompt_id: str, line: str, url: str, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a request to `url`; errors say `line` for the place of its `body`.

    Its `Prompt.sampling` holds what the body names. Raises PromptError: the request cannot be honoured.
    """
    body = {name: value for name, value in body.items() if value is not None}
    _check_fields(line, url, body)
    sampling = {name: value for name, value in body.items() if name in _SAMPLING}
    sampling |= _logprobs(line, url, body) | _grammar(line, url, body)
    prompt = Prompt(prompt_id, max_new_tokens=_limit(line, body), sampling=sampling, stop=_stop(line, body))
    if url == COMPLETIONS:
        return replace(prompt, **_text_or_ids(line, body.get("prompt")))
    return replace(prompt, messages=_messages(line, body.get("messages") if url == CHAT else messages_of(line, body)))


def _check_fields(line: str, url: str, body: Mapping[str, Any]) -> None:
    """Raises PromptError, naming the field: the engine cannot honour one."""
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
    if url == COMPLETIONS:
        return {} if logprobs is None else {"logprobs": logprobs}
    if logprobs not in (None, True, False):
        raise PromptError(f"{line}: logprobs is {logprobs!r}; for {url} it must be true or false")
    if not logprobs and top is not None:
        raise PromptError(f"{line}: top_logprobs is {top!r} without logprobs=true; add that, or leave it out")
    return {"logprobs": 0 if top is None else top} if logprobs else {}


def _grammar(line: str, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The option `grammar` of `SamplingParams`, of the form of an answer. A schema is followed, strict or not."""
    name, form = ("text.format", format_of(line, body)) if url == RESPONSES else (_FORM, body.get(_FORM))
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or form == {"type": "text"}:
        return {}
    if kind == "json_object":
        return {"grammar": "json"}
    details = (form if url == RESPONSES else form.get("json_schema")) if kind == "json_schema" else None
    if isinstance(details, dict) and isinstance(schema := details.get("schema"), dict):
        return {"grammar": schema}
    where = '"schema": …' if url == RESPONSES else '"json_schema": {"schema": …}'
    raise PromptError(f"{line}: {name} is {form!s:.60}; its type is text, json_object, or json_schema with {{{where}}}")


def _limit(line: str, body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if name in body]
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


def refusal(message: str, kind: str = "invalid_request_error") -> _Row:
    """The body of an answer that is none."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


@dataclass(frozen=True)
class Answer:
    """Writes the answer to `prompt`, whole or as the parts of a stream; rows are as ``generations.jsonl`` has them.

    Args:
        origin: the fields ``id``, in front of which its kind is put, ``created`` and ``model``.
        token_bytes: makes the function from a token to its bytes; it is made if a row has log-probabilities.
    """

    prompt: Prompt
    origin: _Row
    token_bytes: _MakeTokenBytes

    def whole(self, rows: Seq[_Row]) -> _Row:
        """The body of the answer: the rows of the prompt are its choices."""
        num_prompt, num_new = rows[0]["num_prompt_tokens"], sum(len(row["token_ids"]) for row in rows)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        return self._body(enumerate(rows)) | {"usage": usage}

    def parts(self, index: int, text: str, row: _Row | None = None) -> list[_Row]:
        """The part with the `text` that choice `index` has new; its ``finish_reason`` is null without its `row`, which
        has finished. An empty text begins the choice.
        """
        body = self._body([(index, (row or {"finish_reason": None}) | {"text": text})])
        if self.prompt.messages is not None:
            (choice,), body["object"] = body["choices"], "chat.completion.chunk"
            choice["delta"] = {"content": choice.pop("message")["content"]}
            if not text and row is None:
                choice["delta"] |= {"role": "assistant"}
        return [body]

    def _body(self, rows: Iterable[tuple[int, _Row]]) -> _Row:
        is_chat = self.prompt.messages is not None
        return {
            **self.origin,
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.origin['id']}",
            "object": "chat.completion" if is_chat else "text_completion",
            "choices": [_choice(row, index, self.token_bytes, is_chat=is_chat) for index, row in rows],
        }


def _choice(row: _Row, index: int, token_bytes: _MakeTokenBytes, *, is_chat: bool) -> _Row:
    logprobs, text = None, row["text"]
    if (tokens := row.get("logprobs")) is not None:
        logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(tokens, token_bytes())
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": index, **content, "finish_reason": _REASONS[row["finish_reason"]], "logprobs": logprobs}


def _chat_logprobs(tokens: Seq[_Row], token_bytes: Callable[[int], bytes]) -> _Row:
    def entry(token_id: int, logprob: float | None) -> _Row:
        content = token_bytes(token_id)
        return {"token": _text(content), "logprob": _number(logprob), "bytes": list(content)}

    content = [
        entry(token["token_id"], token["logprob"]) | {"top_logprobs": [entry(*other) for other in token["top"]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Seq[_Row], token_bytes: Callable[[int], bytes]) -> _Row:
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
