"""`emssd.decoding.check.compare` tells equal rows, numerical ties and true differences apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from emssd_testing.models import tiny_model

from emssd import Engine, Generation
from emssd.decoding.check import TIE_TOLERANCE, compare
from emssd.sampling import SamplingParams
from emssd.sequences import Request, Row

PROMPTS = [[3, 4, 5, 3, 4], [7], [8, 9, 8, 9]]
NEW_TOKENS = 8


@pytest.fixture
def engine() -> Engine:
    return Engine.from_model(tiny_model("llama", max_model_len=64), drafter="none")


def rows(params: SamplingParams) -> dict[str, Row]:
    """The first prompt's, as it begins."""
    return {"0": Row(Request("0", tuple(PROMPTS[0]), 1, sampling=params))}


def logits_after(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """The model's own logits, ``[vocab]``."""
    with torch.inference_mode():
        logits: torch.Tensor = engine.target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def tie_rows_of_the_output_layer(engine: Engine, token: int, twin: int, by: float) -> None:
    """Give `twin` the logits of `token`, but for a difference of about `by` times their size."""
    with torch.no_grad():
        weight = engine.target.model.lm_head.weight
        weight[twin] = weight[token] * (1 - by)


def with_token(generation: Generation, position: int, token: int) -> Generation:
    tokens = list(generation.token_ids)
    tokens[position] = token
    return replace(generation, token_ids=tuple(tokens))


def another_than(*tokens: int) -> int:
    return next(token for token in range(3, 61) if token not in tokens)


def test_equal_rows_are_exact(engine: Engine) -> None:
    greedy = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    report = compare(list(greedy), greedy, engine.runner)
    assert report.num_exact == 3
    assert report.differences == ()
    assert report.ties == report.true_differences == []


@pytest.mark.parametrize("position", [0, 3, NEW_TOKENS - 1])
def test_a_planted_difference_is_a_true_difference_with_its_margin(engine: Engine, position: int) -> None:
    greedy = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    right, last = greedy[1].token_ids[position], greedy[1].token_ids[-1]
    wrong = another_than(right, last)
    ours = with_token(with_token(greedy[1], -1, wrong), position, wrong)  # the first one counts
    report = compare([greedy[0], ours, greedy[2]], greedy, engine.runner)
    (difference,) = report.true_differences
    assert report.num_exact == 2
    assert report.ties == []
    assert (difference.request_id, difference.position) == ("1", position)
    assert (difference.token, difference.greedy_token) == (wrong, right)
    logits = logits_after(engine, [7, *greedy[1].token_ids[:position]])
    assert difference.margin == pytest.approx(float(logits[right] - logits[wrong]), rel=1e-6)
    assert difference.tolerance == pytest.approx(1e-10 * float(logits.abs().max()), rel=1e-6)
    assert engine.runner.usage.held == 0
    assert engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True) == greedy, "the backend is idle again"


@pytest.mark.parametrize(("by", "is_tie"), [(0.0, True), (1e-13, True), (1e-6, False)])
def test_a_planted_tie_is_a_tie_up_to_the_tolerance(engine: Engine, by: float, is_tie: bool) -> None:
    before = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)[0].token_ids[0]
    twin = another_than(before)
    tie_rows_of_the_output_layer(engine, before, twin, by)
    greedy = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    chosen = greedy[0].token_ids[0]
    assert chosen in {before, twin}
    other = twin if chosen == before else before
    report = compare([with_token(greedy[0], 0, other), *greedy[1:]], greedy, engine.runner)
    (difference,) = report.differences
    assert (len(report.ties), len(report.true_differences)) == ((1, 0) if is_tie else (0, 1))
    logits = logits_after(engine, PROMPTS[0])
    assert difference.margin == pytest.approx(float(abs(logits[before] - logits[twin])), rel=1e-3, abs=1e-13)


def test_two_equal_tokens_that_are_both_far_from_the_best_are_no_tie(engine: Engine) -> None:
    logits = logits_after(engine, PROMPTS[0])
    low = int(logits.argmin())
    twin = another_than(low, int(logits.argmax()))
    tie_rows_of_the_output_layer(engine, low, twin, 0.0)
    greedy = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    ours, theirs = with_token(greedy[0], 0, low), with_token(greedy[0], 0, twin)
    (difference,) = compare([ours], [theirs], engine.runner).true_differences
    assert difference.margin == pytest.approx(float(logits.max() - logits.min()), rel=1e-6)


@pytest.mark.parametrize("shorter", ["ours", "greedy"])
def test_a_row_that_ended_early_is_a_true_difference(engine: Engine, shorter: str) -> None:
    full = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    short = [replace(full[0], token_ids=full[0].token_ids[:5]), *full[1:]]
    ours, greedy = (short, full) if shorter == "ours" else (full, short)
    (difference,) = compare(ours, greedy, engine.runner).true_differences
    assert difference.position == 5
    assert (difference.token is None, difference.greedy_token is None) == (shorter == "ours", shorter == "greedy")
    assert difference.margin == float("inf")


def test_lists_of_unequal_length_are_refused(engine: Engine) -> None:
    greedy = engine.generate(PROMPTS, NEW_TOKENS)
    with pytest.raises(ValueError, match="longer than"):
        compare(greedy[:2], greedy, engine.runner)


def test_every_precision_that_can_be_asked_for_has_a_tolerance_and_finer_ones_a_smaller() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tolerances = [TIE_TOLERANCE[dtype] for dtype in order]
    assert tolerances == sorted(set(tolerances))


@pytest.mark.parametrize("by", [1e-12, -1e-12])
@pytest.mark.parametrize("cut", ["top_k", "top_p", "min_p", "typical_p"])
def test_a_token_at_the_edge_of_a_cut_off_is_a_tie(engine: Engine, cut: str, by: float) -> None:
    """A token and its twin stand at the edge: one run has kept the one, and another run the other, or both."""

    def ranked() -> tuple[torch.Tensor, list[int]]:
        chances = logits_after(engine, PROMPTS[0]).softmax(0)
        surprise = -chances.log()
        worse = (surprise - (chances * surprise).sum()).abs() if cut == "typical_p" else surprise
        return chances, worse.argsort().tolist()

    _, (_, _, edge, *_, twin) = ranked()
    tie_rows_of_the_output_layer(engine, edge, twin, by)
    chances, order = ranked()
    kept, lost = sorted((edge, twin), key=order.index)
    above = order[: order.index(kept)]
    mass = float(chances[above].sum() + chances[kept] * (1 - 1e-13))
    limits = {"top_k": len(above) + 1, "min_p": float((chances[kept] + chances[lost]) / 2 / chances.max())}
    num_found = 0
    for seed in range(40):
        params = SamplingParams(seed=seed, **{cut: limits.get(cut, mass)})  # type: ignore[arg-type]
        plain = engine.generate(PROMPTS[:1], 1, sampling=params)
        for left in ([*above, kept, lost], [*above, lost]):
            others = {token: -math.inf for token in order if token not in left}
            other = engine.generate(PROMPTS[:1], 1, sampling=SamplingParams(seed=seed, logit_bias=others))
            if other[0].token_ids != plain[0].token_ids:
                for ours, theirs in ((other, plain), (plain, other)):
                    (difference,) = compare(ours, theirs, engine.runner, rows(params)).differences
                    assert difference.is_tie
                    num_found += 1
    assert num_found > 4


def test_a_token_far_below_a_cut_off_is_a_true_difference(engine: Engine) -> None:
    params = SamplingParams(temperature=100.0, top_k=3, seed=1)
    plain = engine.generate(PROMPTS[:1], 1, sampling=params)
    last = int(logits_after(engine, PROMPTS[0]).argmin())
    (difference,) = compare([with_token(plain[0], 0, last)], plain, engine.runner, rows(params)).true_differences
    assert difference.margin == float("inf")
