"""Outputs of a grammar: valid, and those of the same run without drafts, whatever drafts, in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import regex
import torch
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter

from emssd.drafting import Draft, Drafter
from emssd.sampling import SamplingParams
from emssd.sampling.grammar import Grammar
from emssd.sampling.matching import masked
from emssd.sequences import FinishReason, Generation, Request
from tests.support.grammar_engines import (
    DRAFTERS,
    VOCAB,
    Tally,
    begun,
    check,
    decode,
    drafter_of,
    make_engine,
    plainly,
    requests,
    target,
)
from tests.support.grammars import EOS, is_valid, tokenizer
from tests.support.tiers import looped

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'emssd[grammar]'")

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = COMPACT | {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "true": {"type": "boolean"}},
    "required": ["name", "true"],
    "additionalProperties": False,
}


def texts(done: Mapping[str, Generation]) -> dict[str, tuple[int, ...]]:
    return {name: row.token_ids for name, row in done.items()}


@looped("seed", range(len(DRAFTERS)), at_a_time=4)
def test_texts_are_valid_and_those_of_the_run_without_drafts(seed: int) -> None:
    """Each drafter once; see `check`."""
    tally = Tally()
    check(seed, 2, tally)
    assert tally.texts.total() == 2


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(25))
def test_ten_thousand_texts_are_valid_and_those_of_the_run_without_drafts(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    """500 texts a part, of 400 and more different schemas and expressions; the drafters take turns."""
    tally = Tally()
    for seed in range(1000 + part * 100, 1100 + part * 100):
        check(seed, 5, tally)
    record_property("tally", repr(tally))  # a worker sends plain values alone
    assert tally.texts.total() == 500
    assert len(tally.texts) == len(DRAFTERS)
    assert len(tally.grammars) >= 400
    assert tally.ended > 250
    assert tally.preempted > 0
    assert tally.accepted.total() > 0


def test_preempted_rows_go_on_with_the_same_text() -> None:
    wanted = requests([PERSON] * 4, temperature=1.0)
    expected = texts(plainly(wanted))
    engine = make_engine(TreeDrafter(VOCAB, 9, expected, right=0.8), batch_size=4, max_tokens=45)
    assert texts(decode(engine, wanted)) == expected
    assert engine.report.num_preempted > 0


def test_greedy_texts_are_those_of_whole_passes_with_brute_force_masks() -> None:
    """The judge is partial matching and one pass of the whole text for each token; nothing of emssd is used."""
    expression, encoder = "(name|ab){2,4}: [0-9]{2}(true|false)", tokenizer()
    (request,) = requests([f"regex:{expression}"], temperature=0.0)
    tokens, text = list(request.prompt_ids), ""
    while len(tokens) < 27:
        logits = target().model(torch.tensor([tokens])).logits[0, -1].detach()
        pieces = {token: encoder.decode([token]) for token in range(3, len(encoder))}
        allowed = [token for token, piece in pieces.items() if regex.fullmatch(expression, text + piece, partial=True)]
        if not allowed:
            break
        whole = [token for token in allowed if forced_whole(pieces[token], text, expression, pieces)]
        token = max(whole or allowed, key=lambda one: float(logits[one]))
        tokens.append(token)
        text += pieces[token]
    done = decode(make_engine(TreeDrafter(VOCAB, 8, seed=1)), [request])["0"]
    assert done.text == text
    assert regex.fullmatch(expression, text)


def forced_whole(piece: str, text: str, expression: str, pieces: dict[int, str]) -> bool:
    """Whether `piece` is the longest of the tokens, where all that are allowed begin alike."""
    allowed = [other for other in pieces.values() if regex.fullmatch(expression, text + other, partial=True)]
    longest = max(allowed, key=len)
    return piece == longest and all(longest.startswith(other) for other in allowed)


def test_forced_tokens_are_drafted_and_all_of_them_accepted() -> None:
    wanted = requests([PERSON] * 3, temperature=1.0)
    engine = make_engine()
    assert texts(decode(engine, wanted)) == texts(plainly(wanted))
    assert engine.report.num_drafted == engine.report.num_accepted > 10


def test_what_a_grammar_forbids_is_not_verified() -> None:
    wanted = requests([PERSON], temperature=1.0)
    (expected,) = plainly(wanted).values()

    class Stray(Drafter):
        num_speculative_tokens, drafts_trees = 4, True

        def propose(self, batch: Any, budget: Seq[int]) -> Draft:
            (row,) = batch
            right = list(expected.token_ids[len(row.output_ids) :][:2])
            tree = [(2, -1), (right[0], -1), (7, 0), *[(token, 1) for token in right[1:]]][: budget[0]]
            return Draft.from_trees([tree]).shallow([max(0, row.num_remaining - 1)])

    engine = make_engine(Stray())
    seen = list[Draft]()
    inner = engine.drafting.propose
    engine.drafting.propose = lambda *arguments: seen.append(inner(*arguments)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    assert decode(engine, wanted)["0"].token_ids == expected.token_ids
    state = begun(PERSON)
    assert not state.allows(2)
    assert all(2 not in draft.token_ids.tolist() for draft in seen)
    assert any(draft.indptr[-1] for draft in seen)


@pytest.mark.parametrize("name", ["right and wrong trees", "draft_model, rsd_s", "draft_model"])
def test_residual_sampling_gives_valid_texts(name: str) -> None:
    wanted = requests([PERSON] * 4, temperature=1.0, method="residual", limit=40)
    engine = make_engine(drafter_of(name, {}, 0))
    for done in decode(engine, wanted).values():
        assert done.finish_reason is FinishReason.EOS
        assert is_valid(done.text or "", Grammar.of(PERSON))


def test_the_finish_reason_says_where_a_text_was_cut() -> None:
    (short,) = requests([PERSON], limit=3, temperature=1.0)
    assert decode(make_engine(), [short])["0"].finish_reason is FinishReason.LENGTH
    (whole,) = requests([PERSON], temperature=1.0)
    done = decode(make_engine(), [whole])["0"]
    assert (done.finish_reason, done.token_ids[-1]) == (FinishReason.EOS, EOS)


def test_stop_strings_and_limits_cut_in_the_middle_of_a_value_at_the_same_token_whatever_drafts() -> None:
    sampling = SamplingParams(temperature=1.0, grammar=r'regex:\{"name": "[ab10]{6}", "true": (true|10)\}')
    for drafter in ("none", "suffix", RandomDrafter(VOCAB, 5), TreeDrafter(VOCAB, 8, seed=2)):
        engine = make_engine(drafter)
        (stopped,) = engine.generate([(40, 50, 60)], 30, stop=["1", "0", "b"], sampling=sampling)
        (cut,) = engine.generate([(40, 50, 60)], 4, sampling=sampling)
        (whole,) = engine.generate([(40, 50, 60)], 30, sampling=sampling)
        assert (stopped.finish_reason, cut.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        assert cut.token_ids == whole.token_ids[:4]
        assert not is_valid(stopped.text or "", Grammar.of(sampling.grammar))
        assert is_valid(whole.text or "", Grammar.of(sampling.grammar))


def test_without_eos_in_a_request_the_text_goes_on_with_eos_to_its_limit() -> None:
    request = replace(requests(["regex:ab"], limit=6)[0], eos_token_ids=frozenset())
    done = decode(make_engine(RandomDrafter(VOCAB, 4)), [request])["0"]
    assert done.text == "ab"
    assert done.token_ids[-1] == EOS
    assert done.finish_reason is FinishReason.LENGTH


def test_own_log_probabilities_are_the_models_and_processed_ones_those_behind_the_mask() -> None:
    (request,) = requests(["regex:(true|10)name"], temperature=1.0, logprobs=0)
    processed = replace(request, sampling=replace(request.sampling, processed_logprobs=True))
    first = decode(make_engine(RandomDrafter(VOCAB, 4)), [request])["0"]
    second = decode(make_engine(RandomDrafter(VOCAB, 4)), [processed])["0"]
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert first.token_ids == second.token_ids
    assert second.logprobs[-1].logprob == 0.0, "only EOS is left"
    assert first.logprobs[-1].logprob < -1
    logits = target().model(torch.tensor([request.prompt_ids])).logits[0, -1].double().detach()
    assert first.logprobs[0].logprob == pytest.approx(float(logits.log_softmax(0)[first.token_ids[0]]))
    alone = masked(logits[None], [begun("regex:(true|10)name")])[0]
    assert second.logprobs[0].logprob == pytest.approx(float(alone.log_softmax(0)[first.token_ids[0]]))


def test_a_grammar_holds_where_a_bias_or_the_model_leaves_none_of_its_tokens() -> None:
    encoder = tokenizer()
    bias = {token: -float("inf") for token in range(VOCAB) if "b" in encoder.decode([token])}
    (request,) = requests(["regex:abc"], temperature=1.0, logit_bias=bias)
    assert decode(make_engine(RandomDrafter(VOCAB, 3)), [request])["0"].text == "abc"
    logits = torch.full((2, VOCAB), torch.nan)
    logits[1] = -torch.inf
    state = begun("regex:abc")
    chosen = masked(logits, [state, state]).argmax(dim=1).tolist()
    assert all(state.allows(token) for token in chosen)


def test_a_dead_end_ends_its_row_alone_at_the_same_token_whatever_drafts() -> None:
    """No token stands for what must follow: EOS is no text."""
    wanted = requests([f"lark:start: /[ab]{{3,6}}c/ <[{EOS}]>", "regex:[abc]{9}"] * 2, temperature=1.0, seed=5)
    expected = plainly(wanted)
    for right in (0.3, 1.0):
        done = decode(make_engine(TreeDrafter(VOCAB, 9, texts(expected), right=right)), wanted)
        assert {name: (row.token_ids, row.error) for name, row in done.items()} == {
            name: (row.token_ids, row.error) for name, row in expected.items()
        }
    for name, done in expected.items():
        assert (done.finish_reason is FinishReason.ERROR) == (done.error is not None) == (name in "02"), done
        assert is_valid(done.text or "", Grammar("regex", "[ab]{3,6}c" if name in "02" else "[abc]{9}"))


def test_all_that_is_right_is_accepted() -> None:
    wanted = requests([PERSON] * 3, temperature=1.0)
    engine = make_engine(PerfectDrafter(VOCAB, 4, texts(plainly(wanted))))
    decode(engine, wanted)
    assert engine.report.num_accepted == engine.report.num_drafted


def test_rows_with_and_without_a_grammar_share_a_batch() -> None:
    free = Request("free", (40, 50, 60), 20, frozenset([EOS]), sampling=SamplingParams(temperature=1.0))
    wanted = [free, *requests([PERSON, "regex:(ab)*10"], temperature=1.0)]
    expected = texts(plainly(wanted))
    assert texts(decode(make_engine(TreeDrafter(VOCAB, 6, expected)), wanted)) == expected
