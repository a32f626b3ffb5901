"""A stop string ends a row with the token that completes it.

Oracles: decoding everything after every token (here), and ``generate(stop_strings=…)`` (tests/data/test_demo.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emssd_testing.strategies import drafters
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from emssd.attention import AttentionBackend
from emssd.errors import ConfigError
from emssd.sequences import FinishReason, Request, Row, StopStrings
from tests.support.oracle import build, oracle_of
from tests.support.strategies import prompt_batches
from tests.support.tiers import looped

LOST = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<unk>", "<s>", "</s>"]
TEXT = "ab é€😀\n"


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's: one token per byte, and some that hold several, among them pieces of characters."""
    as_token = bytes_to_unicode()
    alphabet = sorted(as_token.values())
    pieces = [b"ab", b"ba", b" a", b"aba", b"b\xc3", b"\xa9a", b"\x82\xac", b"\x98\x80b", b"\xf0\x9f", b"\n\n", b"a\n"]
    tokens = [*SPECIAL, *alphabet, *("".join(as_token[byte] for byte in piece) for piece in pieces)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def _sentencepiece() -> PreTrainedTokenizerFast:
    """Like Llama 2's: words begin with a mark, decoding takes the first space away, rare characters are byte tokens."""
    pieces = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁é", "b▁", "<0x>"]
    tokens = [*SPECIAL, *pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer)


BYTE_LEVEL, SENTENCEPIECE = _byte_level(), _sentencepiece()


def first_end(stop: StopStrings, ids: list[int]) -> int | None:
    """After how many of `ids` a sequence that grows by them would end."""
    return next((k for k in range(1, len(ids) + 1) if stop.completed_by_last(ids[:k], 0)), None)


def brute_force(strings: list[str], texts: list[str]) -> tuple[int, int] | None:
    """The number of the first of the growing `texts` that holds one of `strings`, and where the earliest begins."""
    for k, text in enumerate(texts, start=1):
        places = [text.find(string) for string in strings if string in text]
        if places:
            return k, min(places)
    return None


def stop_strings(text: str) -> st.SearchStrategy[list[str]]:
    """Pieces of `text`, so that there is something to find, and others."""
    places = st.integers(0, max(len(text) - 1, 0))
    pieces = st.builds(lambda start, length: text[start : start + length], places, st.integers(1, 6))
    some = st.one_of(pieces, st.text(TEXT, min_size=1, max_size=4))
    # No tokens spell what stands for lost bytes, though a half character at the end looks like it while it is written.
    return st.lists(some.filter(lambda string: string and LOST not in string), min_size=1, max_size=3)


@given(data=st.data())
def test_byte_level_tokens_of_any_bytes(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(len(SPECIAL), len(BYTE_LEVEL) - 1), min_size=1, max_size=12), label="any ids")
    tail = BYTE_LEVEL.encode(data.draw(st.text(TEXT, max_size=12), label="text"), add_special_tokens=False)
    ids = data.draw(st.permutations(ids)) + tail
    texts = [BYTE_LEVEL.decode(ids[:k]) for k in range(1, len(ids) + 1)]
    strings = data.draw(stop_strings(texts[-1]), label="stop")
    stop = StopStrings(strings, BYTE_LEVEL)
    expected = brute_force(strings, texts)
    assert first_end(stop, ids) == (expected and expected[0])
    if expected:
        k, offset = expected
        assert stop.text_before(ids[:k]) == texts[k - 1][:offset]


def _byte_tokens(char: str) -> list[int]:
    return [SENTENCEPIECE.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in char.encode()]


UNITS = st.one_of(
    st.integers(len(SPECIAL), len(SPECIAL) + 10).map(lambda token: [token]), st.sampled_from("😀€\né").map(_byte_tokens)
)


@given(data=st.data())
def test_sentencepiece_tokens(data: st.DataObject) -> None:
    """The text is that after another token: a row goes on with its prompt, so that its first space counts."""
    ids = [token for unit in data.draw(st.lists(UNITS, min_size=1, max_size=12), label="ids") for token in unit]
    before = SENTENCEPIECE.convert_tokens_to_ids("a")
    texts = [SENTENCEPIECE.decode([before, *ids[:k]])[1:] for k in range(1, len(ids) + 1)]
    strings = data.draw(stop_strings(texts[-1]), label="stop")
    stop = StopStrings(strings, SENTENCEPIECE)
    expected = brute_force(strings, texts)
    assert first_end(stop, ids) == (expected and expected[0])
    if expected:
        k, offset = expected
        assert stop.text_before(ids[:k]) == texts[k - 1][:offset].removeprefix(" ")


@looped(
    ("strings", "pieces", "text"),
    [
        (["ab"], ["b", "a", "ba"], "b"),  # spread over tokens, with more after it in the last one
        (["€"], ["a", "â", "Ĥ", "¬"], "a"),  # a character of three byte tokens
        (["é", "éa"], ["bÃ", "©a"], "b"),  # begins inside a token, in the middle of a character's bytes
        (["b", "ba"], ["a", "ba"], "a"),  # both at once
        (["a", "ba"], ["b", "ba"], "b"),
        (["</s>"], ["a", "</s>"], "a"),  # a special token, which decoding leaves out
        (["s>a"], ["a", "</s>", "ab"], "a"),
        (["\n\n"], ["ab", "a\u010a", "\u010a\u010a"], "aba"),
    ],
)  # fmt: skip
def test_the_text_ends_before_the_stop_string(strings: list[str], pieces: list[str], text: str) -> None:
    ids = [BYTE_LEVEL.convert_tokens_to_ids(piece) for piece in pieces]
    assert None not in ids
    stop = StopStrings(strings, BYTE_LEVEL)
    assert first_end(stop, ids) == len(ids)
    assert stop.text_before(ids) == text


def test_a_token_behind_a_stop_string_completes_nothing() -> None:
    a, b = BYTE_LEVEL.convert_tokens_to_ids(["a", "b"])
    stop = StopStrings(["ab", "aba"], BYTE_LEVEL)
    assert [stop.completed_by_last(ids, 0) for ids in ([a, b], [a, b, b], [a, b, a])] == [True, False, True]
    assert not stop.completed_by_last([a, b, a], 1)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    a, b = BYTE_LEVEL.convert_tokens_to_ids(["a", "b"])
    stop = StopStrings(["ab"], BYTE_LEVEL)
    assert first_end(stop, [5000, a, 5000, 5001, 5002, b, a]) == 6
    assert stop.text_before([5000, a, 5000, 5001, 5002, b]) == ""


def _row(strings: list[str], prompt: str, limit: int = 9, eos: str | None = None) -> Row:
    ids = tuple(BYTE_LEVEL.convert_tokens_to_ids(list(prompt)))
    eos_ids = frozenset() if eos is None else frozenset([BYTE_LEVEL.convert_tokens_to_ids(eos)])
    return Row(Request("x", ids, limit, eos_ids, StopStrings(strings, BYTE_LEVEL)))


@looped(
    ("row", "new", "kept", "reason"),
    [
        (_row(["bb"], "ab"), "aab", "aab", None),
        (_row(["bb"], "abb"), "b", "b", None),  # it began in the prompt
        (_row(["bb"], "abb"), "bbbb", "bb", FinishReason.STOP),
        (_row(["aab"], "aa"), "baab", "baab", FinishReason.STOP),
        (_row(["ab"], "a"), "aabbab", "aab", FinishReason.STOP),  # in the middle of what was accepted
        (_row(["b"], "a", eos="b"), "ab", "ab", FinishReason.EOS),  # EOS first
        (_row(["ab"], "a", eos="b"), "bab", "b", FinishReason.EOS),
        (_row(["ab"], "a", limit=2), "ab", "ab", FinishReason.STOP),  # the limit last
        (_row(["ab"], "a", limit=2), "aab", "aa", FinishReason.LENGTH),
    ],
)
def test_a_row_ends_with_the_token_that_completes_a_stop_string(
    row: Row, new: str, kept: str, reason: FinishReason | None
) -> None:
    row.extend(BYTE_LEVEL.convert_tokens_to_ids(list(new)))
    assert BYTE_LEVEL.convert_ids_to_tokens(row.output_ids) == list(kept)
    assert row.finish_reason is reason


@looped(
    ("strings", "tokenizer", "sentence"),
    [
        ("ab", BYTE_LEVEL, "stop is one string; give a list of strings, such as ['ab']"),
        ([], BYTE_LEVEL, "stop holds no string; leave it out, or give the texts that end a row"),
        (["a", ""], BYTE_LEVEL, "stop holds ''; every stop string is a text of at least one character"),
        (
            ["a\ud800"],
            BYTE_LEVEL,
            r"stop holds 'a\ud800', with half of a surrogate pair, '\ud800'; repair what wrote it",
        ),
        (["a", 3], BYTE_LEVEL, "stop holds 3; every stop string is a text of at least one character"),
        (["a"], None, "stop strings are compared with text, but the engine has no tokenizer; pass one"),
    ],
)
def test_what_cannot_be_a_stop_string(strings: Any, tokenizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StopStrings(strings, tokenizer)
    assert str(caught.value) == sentence


def _letters(vocab_size: int) -> PreTrainedTokenizerFast:
    """One letter per id of a tiny model."""
    vocab = {chr(ord("a") + i): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(data=st.data())
def test_the_engine_stops_where_greedy_decoding_would_for_any_drafter(
    data: st.DataObject, make_ragged: Callable[[], AttentionBackend]
) -> None:
    oracle = oracle_of(data.draw(st.sampled_from(["opt-5", "gemma2-7", "llama-11"]), label="model"))
    tokenizer = _letters(oracle.vocab_size)
    prompts = data.draw(prompt_batches(oracle.vocab_size, 5, 20), label="prompts")
    eos = data.draw(st.frozensets(st.integers(0, oracle.vocab_size - 1), max_size=1), label="eos")
    limits = [data.draw(st.integers(1, 14), label="max_new_tokens") for _ in prompts]
    references = oracle.references(prompts, 14)
    words = ["".join(map(chr, (ord("a") + token for token in tokens))) for tokens in references.values()]
    strings = data.draw(stop_strings(data.draw(st.sampled_from(words))), label="stop")
    drafter = data.draw(drafters(oracle.vocab_size, references), label="drafter")
    engine = build(oracle, make_ragged, drafter, 3, tokenizer=tokenizer, eos_token_ids=eos)
    for i, generation in enumerate(engine.generate(prompts, limits, stop=strings)):
        tokens = oracle.reference(prompts[i], limits[i], eos)
        text = words[i][: len(tokens)]
        match = brute_force(strings, [text[:k] for k in range(1, len(text) + 1)])
        ends_with_eos = tokens[-1] in eos and (not match or match[0] == len(tokens))
        if match and not ends_with_eos:
            assert generation.finish_reason is FinishReason.STOP
            assert (generation.token_ids, generation.text) == (tokens[: match[0]], text[: match[1]])
        else:
            assert generation.finish_reason is (FinishReason.EOS if ends_with_eos else FinishReason.LENGTH)
            assert (generation.token_ids, generation.text) == (tokens, text)
    assert engine.runner.usage.held == 0


def test_ignore_eos_leaves_limits_and_stop_strings(oracle: Any, make_ragged: Callable[[], AttentionBackend]) -> None:
    from emssd_none import NoneDrafter

    tokens = oracle.reference([1, 2], 12)
    word = "".join(chr(ord("a") + token) for token in tokens)
    engine = build(oracle, make_ragged, NoneDrafter(), tokenizer=_letters(11), eos_token_ids=tokens[:1])
    (ended,) = engine.generate([[1, 2]], 12)
    assert (ended.finish_reason, len(ended.token_ids)) == (FinishReason.EOS, 1)
    (stopped,) = engine.generate([[1, 2]], 12, stop=[word[1:4]], ignore_eos=True)
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, tokens[:4])
    (full,) = engine.generate([[1, 2]], 12, ignore_eos=True)
    assert (full.finish_reason, full.token_ids) == (FinishReason.LENGTH, tokens)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6), st.text("ab", min_size=1, max_size=3))
def test_growing_in_pieces_equals_growing_at_once(pieces: list[str], string: str) -> None:
    piecewise, whole = _row([string], "ab", limit=12), _row([string], "ab", limit=12)
    for piece in pieces:
        if piecewise.finish_reason is None:
            piecewise.extend(BYTE_LEVEL.convert_tokens_to_ids(list(piece)))
    whole.extend(BYTE_LEVEL.convert_tokens_to_ids(list("".join(pieces))))
    assert (piecewise.output_ids, piecewise.finish_reason) == (whole.output_ids, whole.finish_reason)
