"""Prompts: what a source yields, how they become token ids, and which are refused before any work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral
from operator import index
from typing import Any

from emssd.data.typed import typed
from emssd.errors import ConfigError, PromptError
from emssd.errors.ranges import AtLeastOne

__all__ = [
    "FailedPrompt",
    "Prompt",
    "SourceConfig",
    "Truncate",
    "check_limit",
    "check_prompt",
    "checked",
    "encode_prompts",
    "encode_text",
    "limit_per_prompt",
    "tokenize",
    "truncated",
    "unescaped",
]

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: an id that outputs and errors name it by, and its text, its conversation or its token ids.

    Attributes:
        messages: ``{"role": …, "content": …}`` each; with these, `text` is not used. See `emssd.data.chat`.
        token_ids: of a prompt that is encoded already; with these, neither `text` nor `messages` is used.
        max_new_tokens: its own limit, in the place of the run's.
        sampling: options of `emssd.sampling.SamplingParams` by name, in the place of the run's.
        stop: texts that end its rows, in the place of the run's; they are taken as they stand.
    """

    prompt_id: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_new_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: Mapping[str, Any] | None = None
    stop: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A prompt that cannot be used. Sources yield it in the place of a `Prompt`; ``on_error`` says what it does.

    Attributes:
        error: the whole sentence, with the place.
    """

    prompt_id: str
    error: str


def checked(prompt: Prompt, name: str) -> Prompt | FailedPrompt:
    """`prompt` if its fields are of their types, which a plugin's source may not care for; else why it has failed.

    Errors call it `name`.
    """
    try:
        return typed({field.name: getattr(prompt, field.name, None) for field in fields(Prompt)}, Prompt)
    except ValueError as error:
        return FailedPrompt(name, f"prompt {name} is no Prompt: {error}")


class Truncate(str, Enum):
    """The end of a long prompt that is cut off."""

    none = "none"
    left = "left"
    right = "right"


@dataclass
class SourceConfig:
    """Options that every prompt source has.

    Attributes:
        limit: use only this many prompts.
        truncate: shorten prompts of more than `max_prompt_tokens`; ``none`` makes them an error.
        max_prompt_tokens: ``null`` takes what the model's length leaves beside `max_new_tokens`.
        chat: make each prompt a user's message in the tokenizer's chat template.
        system: system message of conversations that have none of their own.
    """

    limit: AtLeastOne | None = None
    truncate: Truncate = Truncate.none
    max_prompt_tokens: AtLeastOne | None = None
    chat: bool = False
    system: str | None = None


def limit_per_prompt(max_new_tokens: int | Seq[int], num_prompts: int) -> list[int]:
    """``[num_prompts]`` limits of new tokens, of one for all or of one for each."""
    limits = [*max_new_tokens] if isinstance(max_new_tokens, Iterable) else [max_new_tokens] * num_prompts
    if len(limits) != num_prompts:
        raise ConfigError(
            f"max_new_tokens has {len(limits)} limits for {num_prompts} prompts; give one for each, or one number"
        )
    for limit in limits:
        check_limit(limit, "max_new_tokens is")
    return limits


def check_limit(limit: object, what: str) -> None:
    """Make sure that `limit`, of which an error says `what`, is one of new tokens."""
    if not isinstance(limit, Integral) or limit < 1:
        raise ConfigError(f"{what} {limit!r:.60}; it must be a whole number of at least 1")


def encode_prompts(prompts: Iterable[str | Seq[int]], tokenizer: Any) -> list[list[int]]:
    """Encode `prompts` as `encode_text`, leaving token ids as they are; errors call each prompt by its index."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        what = "one string" if isinstance(prompts, str) else f"{prompts!r:.60}"
        raise ConfigError(f"prompts is {what}; give a list of prompts, such as [prompt]")
    return [
        encode_text(prompt, tokenizer, str(number)) if isinstance(prompt, str) else _ids(prompt, str(number))
        for number, prompt in enumerate(prompts)
    ]


def _ids(prompt: Iterable[int], name: str) -> list[int]:
    try:
        return list(map(index, prompt))
    except TypeError:
        raise PromptError(f"prompt {name} is {prompt!r:.60}; give a text, or a list of token ids") from None


def encode_text(text: str, tokenizer: Any, name: str) -> list[int]:
    """Token ids of `text`, which errors call `name`; one that starts with the BOS token gets no second one. Raises
    PromptError: it is empty; or ConfigError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("prompts are texts, but the engine has no tokenizer; pass one, or give token ids")
    if not text:
        raise PromptError(f"prompt {name} is empty; there is nothing to continue")
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenize(text, tokenizer, name, add_special_tokens=not has_bos)


def tokenize(text: str, tokenizer: Any, name: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`, which errors call `name`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt {name} is no Unicode text: character {error.start + 1} is half of a surrogate pair, "
            f"{text[error.start]!a}; repair what wrote it"
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    if not ids:
        raise PromptError(f"prompt {name} is a text of which the tokenizer makes no token; is it the model's own?")
    return ids


def check_prompt(ids: Seq[int], max_model_len: int, vocab_size: int, name: str) -> None:
    """Make sure that the model can continue `ids`."""
    if not _ids(ids, name):
        raise PromptError(f"prompt {name} is empty; there is nothing to continue")
    if len(ids) >= max_model_len:
        raise PromptError(
            f"prompt {name} has {len(ids)} tokens, and the model takes {max_model_len} with at least one new one; "
            f"shorten it or truncate prompts to {max_model_len - 1} tokens or fewer (data.max_prompt_tokens)"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise PromptError(f"prompt {name} has token ids outside the model's vocabulary of {vocab_size}")


def truncated(ids: list[int], config: SourceConfig, room: int, name: str) -> list[int]:
    """`ids` of prompt `name` cut to `config.max_prompt_tokens`, or to `room` if that is not set."""
    limit = room if config.max_prompt_tokens is None else config.max_prompt_tokens
    if config.truncate is Truncate.none:
        if config.max_prompt_tokens is not None and len(ids) > limit:
            raise PromptError(
                f"prompt {name} has {len(ids)} tokens, and data.max_prompt_tokens is {limit}; "
                f"raise it, or cut prompts with data.truncate=left or data.truncate=right"
            )
        return ids
    if limit < 1:  # as the run's own option is at least 1
        raise PromptError(f"max_new_tokens leaves {limit} tokens for prompts; lower it by {1 - limit} or more")
    return ids[-limit:] if config.truncate is Truncate.left else ids[:limit]


def unescaped(text: str) -> str:
    r"""`text` with ``\n``, ``\t``, ``\r`` and ``\\`` as what they stand for: neither a shell nor Hydra does that."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)
