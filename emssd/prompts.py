"""Turns prompts into token ids and refuses, before any work, those that cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from emssd.errors import ConfigError, PromptError

__all__ = ["encode_prompts"]


def encode_prompts(
    prompts: Iterable[str | Seq[int]],
    tokenizer: Any,
    max_model_len: int,
    vocab_size: int,
    names: Seq[str] | None = None,
) -> list[list[int]]:
    """Encode `prompts`, leaving token ids as they are.

    A text that already starts with the tokenizer's BOS token gets no second one.

    Args:
        prompts: texts or token ids.
        tokenizer: a Hugging Face tokenizer, or ``None`` where all prompts are token ids.
        max_model_len: a prompt must be shorter than this.
        vocab_size: token ids must be below it.
        names: how errors call each prompt; the index by default.

    Raises:
        PromptError: a prompt is empty, leaves no room for a new token, or has ids outside the vocabulary.
        ConfigError: a text, but no tokenizer; or one string in the place of a list.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one string; give a list of prompts, such as [prompt]")
    encoded = []
    for index, prompt in enumerate(prompts):
        name = names[index] if names is not None else str(index)
        ids = _encode_text(prompt, tokenizer) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids or (isinstance(prompt, str) and not prompt):
            raise PromptError(f"prompt {name} is empty; there is nothing to continue")
        if len(ids) >= max_model_len:
            raise PromptError(
                f"prompt {name} has {len(ids)} tokens, and the model takes {max_model_len} with at least one new one; "
                f"shorten it or truncate prompts to {max_model_len - 1} tokens or fewer (data.max_prompt_tokens)"
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise PromptError(f"prompt {name} has token ids outside the model's vocabulary of {vocab_size}")
        encoded.append(ids)
    return encoded


def _encode_text(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise ConfigError("prompts are texts, but the engine has no tokenizer; pass one, or give token ids")
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    return ids
