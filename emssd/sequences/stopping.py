r"""Stop strings: which new token completes one, and the text in front of it.

Tokens are compared as the bytes that they stand for, as Transformers' ``StopStringCriteria`` does. UTF-8 marks where
characters begin, so the bytes of a stop string occur in those of the tokens exactly where its characters occur in
their text, whichever tokens they are spread over; and a character that is cut between two tokens needs no care.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from emssd.errors import ConfigError
from emssd.sequences.token_bytes import TokenBytes

__all__ = ["Stop", "StopStrings"]


class Stop(Protocol):
    """A text that ends its sequence when a new token completes it."""

    def completed_by_last(self, tokens: Seq[int], start: int) -> bool:
        """Whether the last of `tokens` ends its sequence, whose new tokens are ``tokens[start:]``."""

    def text_before(self, output: Seq[int]) -> str:
        """The text of an `output` that ended so, up to where this text begins."""


class StopStrings:
    r"""Texts that end a sequence with the token that completes one of them.

    Special tokens count as their text, so ``"<|im_end|>"`` can be a stop string. What the prompt holds does not count,
    nor does a match that began in it.

    Args:
        strings: at least one, none empty.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ConfigError: no string, an empty one, one that is no Unicode text, one text in the place of a list, or no
            tokenizer.
    """

    def __init__(self, strings: Iterable[str], tokenizer: Any) -> None:
        if isinstance(strings, str):
            raise ConfigError(f"stop is one string; give a list of strings, such as [{strings!r}]")
        if not isinstance(strings, Iterable):
            raise ConfigError(f"stop is {strings!r:.60}; give a list of strings, such as ['.']")
        self.strings = tuple(strings)
        if not self.strings:
            raise ConfigError("stop holds no string; leave it out, or give the texts that end a row")
        for string in self.strings:
            if not isinstance(string, str) or not string:
                raise ConfigError(f"stop holds {string!r}; every stop string is a text of at least one character")
        if tokenizer is None:
            raise ConfigError("stop strings are compared with text, but the engine has no tokenizer; pass one")
        self._tokenizer = tokenizer
        try:
            self._encoded = tuple(string.encode() for string in self.strings)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"stop holds {error.object!a}, with half of a surrogate pair, {error.object[error.start]!a}; "
                f"repair what wrote it"
            ) from error
        self._tail = max(map(len, self._encoded)) - 1
        self._bytes = TokenBytes(tokenizer)

    def completed_by_last(self, tokens: Seq[int], start: int) -> bool:
        """Whether the last of `tokens` completes a stop string that lies at or after index `start`.

        A stop string of n bytes that this token completes has at most n - 1 bytes in front of it, so that many bytes
        are looked at, however many tokens hold them.
        """
        return self._first_match(tokens, start) is not None

    def text_before(self, output: Seq[int]) -> str:
        """The text of `output`, whose last token completed a stop string, up to where that begins.

        Special tokens are left out. If the token completes several stop strings, the one that begins first counts.
        """
        match = self._first_match(output, 0)
        assert match is not None, "the row did not end with a stop string"
        index, offset = match
        text: str = self._tokenizer.decode(output[: index + (offset > 0)], skip_special_tokens=True)
        inside = self._bytes(output[index])[offset:].decode(errors="replace") if offset else ""
        return text.removesuffix(inside)  # a special token has left nothing in the text that could go

    def _first_match(self, tokens: Seq[int], start: int) -> tuple[int, int] | None:
        """The start of the earliest stop string that the last token completes: a token's index, and a byte in it."""
        last = self._bytes(tokens[-1])
        window, index = last, len(tokens) - 1
        while len(window) - len(last) < self._tail and index > start:
            index -= 1
            window = self._bytes(tokens[index]) + window
        # Only a match that reaches into the last token is one that this token completes.
        before = len(window) - len(last)
        matches = [window.find(string, max(0, before - len(string) + 1)) for string in self._encoded]
        offset = min([match for match in matches if match >= 0], default=-1)
        if offset < 0:
            return None
        while offset >= (size := len(self._bytes(tokens[index]))):
            offset -= size
            index += 1
        return index, offset
