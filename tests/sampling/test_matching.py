"""Matchers of grammars: what they allow after any text, and which grammars they refuse."""

from __future__ import annotations

import random
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from emssd.sampling.grammar import Grammar
from emssd.sampling.matching import Grammars, MatcherState
from tests.support.grammar_engines import VOCAB, begun, make_engine, requests
from tests.support.grammars import EOS, random_grammar, tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'emssd[grammar]'")


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_partial_matching_by_an_engine_of_regular_expressions(seed: int) -> None:
    grammar = next(one for one in map(random_grammar, range(100 * seed, 100 * seed + 99)) if one.kind == "regex")
    draw, state, text, encoder = random.Random(seed), begun(grammar), "", tokenizer()
    for _ in range(8):
        viable = {
            token
            for token in range(3, len(encoder))
            if "\ufffd" not in (piece := encoder.decode([token]))
            and regex.fullmatch(grammar.text, text + piece, partial=True)
        }
        allowed = allowed_by(state)
        complete = regex.fullmatch(grammar.text, text) is not None
        assert (EOS in allowed) == complete
        byte_tokens = {token for token in allowed if "\ufffd" in encoder.decode([token])}  # parts of a character
        forced = state.forced(1)
        if forced and forced != [EOS]:
            assert allowed == set(forced) <= viable
        else:
            assert allowed - {EOS} - byte_tokens == viable
            assert not byte_tokens or "[^" in grammar.text
        choices = sorted(allowed - byte_tokens - {EOS})
        if not choices:
            break
        token = draw.choice(choices)
        state, text = after(state, token), text + encoder.decode([token])


def allowed_by(state: MatcherState) -> set[int]:
    return {token for token in range(VOCAB) if state.allows(token)}


def test_states_in_any_order_are_those_of_a_matcher_that_only_went_forward() -> None:
    draw, grammars = random.Random(0), Grammars(tokenizer(), VOCAB)
    for seed in range(6):
        grammar = random_grammar(seed)
        states = {(): grammars.begin(grammar, [EOS])}
        for _ in range(25):
            path = draw.choice([*states])
            state = states[path]
            forced = state.forced(4)
            token = draw.choice(sorted(allowed_by(state)))
            if forced:
                assert token == forced[0]
            if (following := state.after(token)) is not None and not following.has_ended:
                states[(*path, token)] = following
        for path, state in states.items():
            fresh = grammars.begin(grammar, [EOS])
            for token in path:
                assert fresh.allows(token)
                fresh = after(fresh, token)
            assert (fresh.mask == state.mask).all()


def test_a_mask_is_not_that_of_another_text_as_long() -> None:
    """After ``[]`` and a space no item may come, whichever text as long, by other tokens, was looked at before."""
    schema = {"type": "object", "properties": {"q": {"type": "array", "items": {"type": "string"}}}, "required": ["q"]}
    encoder = tokenizer()
    space, opened, both, quote = (encoder.convert_tokens_to_ids(name) for name in ("Ġ", "[", "[]", '"'))
    state = begun(schema)
    for token in encoder.encode('{"q":'):
        state = after(state, token)
    assert after(after(after(state, space), opened), space).allows(quote)
    assert not after(after(state, both), space).allows(quote)


def test_token_0_is_text_where_the_tokenizer_names_no_eos() -> None:
    letters = Tokenizer(models.BPE({letter: token for token, letter in enumerate("ab.")}, []))
    letters.decoder = decoders.ByteLevel()
    letters = PreTrainedTokenizerFast(tokenizer_object=letters)
    state = Grammars(letters, 3).begin("regex:(a|b)a", [2])
    assert [token for token in range(3) if state.allows(token)] == [0, 1]
    assert after(after(state, 0), 0).allows(2)


def after(state: MatcherState, token: int) -> MatcherState:
    following = state.after(token)
    assert following is not None
    return following


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("regex:(a", "regular expression"),
        ("lark:start: nothing", "Lark grammar"),
        ({"type": "nonsense"}, "JSON schema"),
        ({"$ref": "#"}, "no output can begin"),
        ({"allOf": [{"$ref": "#"}]}, "no output can begin"),
        ({"$defs": {n: {"$ref": f"#/$defs/{m}"} for n, m in ("ab", "ba")}, "$ref": "#/$defs/a"}, "no output can begin"),
        (f"lark:start: <[{EOS}]>", "is its alphabet in the vocabulary"),
        ("regex:a\ud800", "half of a surrogate pair"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused_before_anything_runs(grammar: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine().add(requests([grammar])[0])


@pytest.mark.parametrize("value", ["person", 5, "regex:", "{", "[1]", "missing.json", ["a"], {"a": {1}}])
def test_values_that_are_no_grammar_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="grammar is"):
        SamplingParams(grammar=value)


def test_engines_that_know_no_text_or_no_end_refuse_grammars() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Grammars(None, VOCAB).begin(Grammar.of("json"), [EOS])
    with pytest.raises(ConfigError, match="no EOS"):
        Grammars(tokenizer(), VOCAB).begin(Grammar.of("json"), [])
    with pytest.raises(ConfigError, match="cannot read this tokenizer"):
        Grammars(object(), VOCAB).begin(Grammar.of("json"), [EOS])
