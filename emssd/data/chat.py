"""Conversations as prompts, through the tokenizer's own chat template."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Timer, get_ident
from typing import Any

from emssd.data.prompts import tokenize
from emssd.errors import ConfigError, PromptError

__all__ = ["check_messages", "encode_chat", "require_template"]

Message = Mapping[str, Any]

_MOST_SECONDS = 10.0  # that a template may take for one conversation: it is a program of whoever made the model
_MOST_CHARACTERS = 2**24


def encode_chat(
    messages: Iterable[Message], tokenizer: Any, name: str = "0", system: str | None = None, template: str | None = None
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins, as `Engine.generate` takes them.

    The template brings all special tokens, BOS too; none is added. `system` goes in front, unless the conversation
    begins with a system message. `template` stands in for the tokenizer's own. Errors call the prompt `name`.
    """
    from jinja2 import TemplateSyntaxError

    require_template(tokenizer, template)
    messages = check_messages(messages, name)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        with _in_time():
            options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(messages, **options)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it makes {len(text)} characters of it, and more than {_MOST_CHARACTERS} are no prompt")
    except (TemplateSyntaxError, SyntaxError, ImportError) as error:  # no conversation could mend that
        raise ConfigError(_broken_template(_line(error))) from error
    except Exception as error:  # a template is a program of the model's authors, and raises what they like
        raise PromptError(
            f"prompt {name}: the tokenizer's chat template refuses the conversation: {_line(error)}"
        ) from error
    if not text:
        raise PromptError(f"prompt {name}: the tokenizer's chat template makes an empty text of the conversation")
    return tokenize(text, tokenizer, name, add_special_tokens=False)


@contextmanager
def _in_time() -> Iterator[None]:
    """Raises in the body, in any Python code, when it takes too long."""
    thread, raise_in = ctypes.c_ulong(get_ident()), ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, is_over = Lock(), False

    def stop() -> None:
        with lock:
            if not is_over:
                raise_in(thread, ctypes.py_object(_TooLongError))

    timer = Timer(_MOST_SECONDS, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:  # an exception that waits is raised by here, as every call lets it in
            is_over = True
        timer.cancel()


class _TooLongError(Exception):
    def __str__(self) -> str:
        return f"it takes more than {_MOST_SECONDS:g} s"


def require_template(tokenizer: Any, template: str | None = None) -> None:
    """Make sure that there is a chat template. Raises ConfigError: there is none, or it is no text."""
    template = template or getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(
            "a conversation needs a tokenizer with a chat template, and this model's has none, as it is probably no "
            "instruction-tuned model; give one with chat_template=FILE, or prompts as the model knows them, without "
            "data.chat (data.template), or to /v1/completions"
        )
    if isinstance(template, Mapping):  # several by name
        template = template.get("default")
        if template is None:
            raise ConfigError(_broken_template("it has several, and none is named default"))
    if not isinstance(template, str):
        raise ConfigError(_broken_template(f"it is {template!r}, and no text"))


def check_messages(messages: Any, name: str) -> list[Message]:
    """`messages` as a list, if they are a conversation. Raises PromptError: they are not, with the place."""
    is_one = isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable)
    listed: list[Message] = [] if is_one else list(messages)
    if not listed:
        raise PromptError(f"prompt {name} is no list of messages")
    for number, message in enumerate(listed, start=1):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise PromptError(
                    f"prompt {name}: message {number} has no text {key!r}; "
                    f'a message is {{"role": "user", "content": "…"}}'
                )
    return listed


def _broken_template(why: str) -> str:
    return (
        f"the tokenizer's chat template cannot be used: {why}; mend it in chat_template.jinja or "
        f"tokenizer_config.json, give another with chat_template=FILE, or leave data.chat out, and write prompts as "
        f"the model knows them (data.template)"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"
