"""Tokenizers whose every token's bytes are known, so that a text can be put together without asking them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

_WORDS = ("the", "and", "stop", " stop", "\n\n", "é", "日本", "🙂", "aab", "abab", " ", "ing", "\n", "Q:", "</s>")
SPECIAL = "<|end|>"


@dataclass(frozen=True)
class Speller:
    """A tokenizer and, apart from it, what each of its tokens stands for; the last is special."""

    tokenizer: Any
    spelling: tuple[bytes, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.spelling)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for ids that round up the vocabulary."""
        return self.spelling[token] if token < len(self.spelling) else b""

    def text_before_stop(self, output: Seq[int], stops: Seq[str]) -> str | None:
        """The text of an output that a stop string ended, up to where the earliest begins; ``None``: no Unicode."""
        text = b"".join(map(self.bytes_of, output))
        end = min(at for stop in stops if (at := text.find(stop.encode())) >= 0)
        shown, begin = b"", 0
        for token in output:
            piece = self.bytes_of(token)
            if token != self.num_tokens - 1:
                shown += piece[: max(0, end - begin)]
            begin += len(piece)
        try:
            return shown.decode()
        except UnicodeDecodeError:
            return None


def draw_speller(rng: random.Random) -> Speller:
    """A byte-level vocabulary, or one of pieces with bytes to fall back on: few letters, some words, odd bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = [bytes([byte]) for byte in b"abQ: \n"] + [word.encode() for word in rng.sample(_WORDS, rng.randint(3, 8))]
    pieces += [bytes([byte]) for byte in (*"🙂é".encode(), *rng.sample(range(0x80, 0x100), rng.randint(0, 6)))]
    pieces = list(dict.fromkeys(pieces))
    rng.shuffle(pieces)
    byte_level, table = rng.random() < 0.6, bytes_to_unicode()
    names = ["".join(map(table.get, piece)) if byte_level else _sentencepiece_name(piece) for piece in pieces]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], byte_fallback=not byte_level))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return Speller(PreTrainedTokenizerFast(tokenizer_object=tokenizer), (*pieces, SPECIAL.encode()))


def _sentencepiece_name(piece: bytes) -> str:
    try:
        return piece.decode().replace(" ", "▁")
    except UnicodeDecodeError:
        return f"<0x{piece[0]:02X}>"
