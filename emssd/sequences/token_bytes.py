"""The bytes that a token stands for inside a text, whatever family its tokenizer is of."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["BYTE_TOKEN", "TokenBytes"]

_BASE = "a"  # a token is decoded after this text, as the first token of a text may lose its leading space
_LOST = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for bytes that are no whole character
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in vocabularies of the sentencepiece family


class TokenBytes:
    """``TokenBytes(tokenizer)(token)``: bytes that are remembered; none for an id that is not in the vocabulary.

    A special token stands for its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._base = list(tokenizer(_BASE, add_special_tokens=False)["input_ids"])
        self._base_text = self._decode(self._base)
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._find_bytes(token)
        return self._known[token]

    def _find_bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # models pad their vocabulary to round sizes
            return b""
        text = self._decode([*self._base, token])
        text = text.removeprefix(self._base_text) if text.startswith(self._base_text) else self._decode([token])
        if _LOST not in text:
            return text.encode()
        if byte := BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        alphabet = _byte_alphabet()
        return bytes(alphabet[char] for char in name) if alphabet.keys() >= set(name) else text.encode()

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
