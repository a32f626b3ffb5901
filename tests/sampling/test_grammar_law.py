"""The mask of a grammar comes before temperature and all else, in both ways of sampling and in `generate`.

Masks are made by partial matching of regular expressions, over the whole vocabulary. Logits are those of whole passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import regex
import torch
from emssd_testing.drafters import RandomDrafter, TreeDrafter
from transformers.generation import (
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import emssd
from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from emssd.sequences import FinishReason
from tests.support.drawing import DrawingDrafter
from tests.support.grammar_engines import VOCAB, decode, drafter_of, make_engine, requests, target
from tests.support.grammars import EOS, tokenizer
from tests.support.tiers import few, looped

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'emssd[grammar]'")

EXPRESSION = "[ab10]{2}"  # nothing is forced but the end
PROMPT = (40, 50, 60)


def allowed(tokens: Seq[int], expression: str = EXPRESSION) -> list[int]:
    """Tokens that may follow `tokens`."""
    encoder = tokenizer()
    text = encoder.decode(tokens)
    if tokens and tokens[-1] in (0, EOS):
        return [0]
    ways = [
        token
        for token in range(3, len(encoder))
        if regex.fullmatch(expression, text + encoder.decode([token]), partial=True)
    ]
    return ways + [EOS] * (regex.fullmatch(expression, text) is not None)


def probabilities(tokens: Seq[int], temperature: float) -> dict[int, float]:
    """Probabilities of the `allowed` tokens."""
    ways = allowed(tokens)
    with torch.no_grad():
        logits = target().model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
    return dict(zip(ways, (logits[ways] / temperature).softmax(0).tolist(), strict=True))


def law(temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    left, law = {(): 1.0}, dict[tuple[int, ...], float]()
    while left:
        tokens, chance = left.popitem()
        for token, share in probabilities(tokens, temperature).items():
            (law if token == EOS else left)[(*tokens, token)] = chance * share
    return law


def drawable(_: Seq[int]) -> torch.Tensor:
    """``[VOCAB]`` the same for tokens of outputs, and for others that the grammar forbids."""
    q = torch.zeros(VOCAB, dtype=torch.float64)
    q[[18, 19, 67, 68, 270, 272, 282, 90, 91]] = 1 / 9
    return q


DRAFTERS: dict[str, Any] = {
    "drawn trees": lambda: DrawingDrafter(drawable, [2, 1]),
    "draft_model, rsd_s": lambda: drafter_of("draft_model, rsd_s", {}, 0),
    "draft_model, rsd_c": lambda: drafter_of("draft_model, rsd_c", {}, 0),
    "trees without distributions": lambda: TreeDrafter(VOCAB, 8, {"0": (71, 72, EOS)}, right=0.5),
}


CASES = [(name, method) for method in ("residual", "coupled") for name in DRAFTERS]
HOT = 4.0


@pytest.mark.parametrize(("drafter", "method"), few(CASES, ci=len(DRAFTERS)))
def test_outputs_have_the_law_of_the_model_among_what_the_grammar_allows(drafter: str, method: str) -> None:
    number, expected = 400, law(HOT)
    assert len(expected) > 15
    assert sum(expected.values()) == pytest.approx(1)
    (request,) = requests([f"regex:{EXPRESSION}"], temperature=HOT, method=method, n=number, seed=3)
    engine = make_engine(DRAFTERS[drafter](), "fused", batch_size=50, force_tokens=False)
    counts = Counter(done.token_ids for done in engine.run([request]))
    assert counts.keys() <= expected.keys()
    assert engine.report.num_accepted > 0 or (drafter, method) == ("drawn trees", "coupled")
    assert p_value(counts, expected) > 1e-3
    assert p_value(counts, law(1.0)) < 1e-6, "so many outputs tell another law"


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """P-value of a G-test. Outputs expected under five times are one."""
    number, often = counts.total(), [text for text in expected if expected[text] * counts.total() >= 5]
    cells = [(counts[text], expected[text] * number) for text in often]
    cells.append((number - sum(count for count, _ in cells), number - sum(mean for _, mean in cells)))
    statistic = 2 * sum(count * math.log(count / mean) for count, mean in cells if count and mean > 0)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(max(statistic, 0.0) / 2, dtype=torch.float64)))


@looped("drafter", ["draft_model, dynamic", "suffix"])
def test_the_mask_comes_before_temperature_top_k_and_top_p(drafter: str) -> None:
    """Each token's probability is that after Transformers' own processors, in its order."""
    warpers = [TemperatureLogitsWarper(2.5), TopKLogitsWarper(6), TopPLogitsWarper(0.8)]
    mask = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(ids[len(PROMPT) :].tolist(), "[a-z10]{2,4}"), 1)
    how: dict[str, Any] = {"temperature": 2.5, "top_k": 6, "top_p": 0.8, "logprobs": 0, "processed_logprobs": True}
    wanted = requests(["regex:[a-z10]{2,4}"] * 3, each=[{"seed": seed} for seed in range(3)], **how)
    num_tokens = 0
    for done in decode(make_engine(drafter_of(drafter, {}, 0)), wanted).values():
        assert done.logprobs is not None
        for number, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
            ids = torch.tensor([[*done.prompt_ids, *done.token_ids[:number]]])
            with torch.no_grad():
                scores = target().model(ids).logits[:, -1]
            scores = mask(ids, scores)
            for warper in warpers:
                scores = warper(ids, scores)
            assert logprob.logprob == pytest.approx(float(scores.log_softmax(-1)[0, token]))
            num_tokens += 1
    assert num_tokens > 6


def generated(**options: Any) -> list[list[int]]:
    """The new tokens of two prompts, one of them padded."""
    inputs = {"input_ids": torch.tensor([[0, *PROMPT], [44, 45, 46, 47]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    usual: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0, "do_sample": False}
    model: Any = target().model
    return model.generate(**inputs, **(usual | options))[:, 4:].tolist()  # type: ignore[no-any-return]


@looped("penalty", [1.0, 1.6])
def test_custom_generate_gives_what_generate_gives_with_a_function_of_allowed_tokens(penalty: float) -> None:
    expression, common = "[a-z10]{5}|[0-9]{3}: [^0-9]{2}", {"repetition_penalty": penalty}
    expected = generated(prefix_allowed_tokens_fn=lambda _, ids: allowed(ids[4:].tolist(), expression), **common)
    ours = {"custom_generate": emssd.custom_generate, "grammar": f"regex:{expression}", "draft_tokenizer": tokenizer()}
    for drafter in ("suffix", RandomDrafter(VOCAB, 4)):
        assert generated(**ours, drafter=drafter, **common) == expected
    assert any(EOS in row for row in expected)


def test_custom_generate_draws_with_a_grammar_and_says_what_it_needs() -> None:
    ours: dict[str, Any] = {"custom_generate": emssd.custom_generate, "grammar": f"regex:{EXPRESSION}"}
    drawn = {"do_sample": True, "seed": 5, "num_return_sequences": 6, "draft_tokenizer": tokenizer()}
    done = generated(**ours, **drawn)
    assert done == generated(**ours, **drawn, drafter="none")
    assert len(done) == 12
    assert len({*map(tuple, done)}) > 3
    for row in done:
        assert regex.fullmatch(EXPRESSION, tokenizer().decode(row, skip_special_tokens=True))
    with pytest.raises(ConfigError, match="no tokenizer"):
        generated(**ours)


@looped("drafter", ["none", "suffix", RandomDrafter(VOCAB, 4)])
def test_with_ignore_eos_the_end_follows_the_output_until_the_limit(drafter: Any) -> None:
    sampling = SamplingParams(temperature=1.0, grammar=f"regex:{EXPRESSION}")
    engine = make_engine(drafter)
    ended, ignored = (engine.generate([PROMPT], 9, sampling=sampling, ignore_eos=ignore)[0] for ignore in (False, True))
    assert (ended.finish_reason, ignored.finish_reason) == (FinishReason.EOS, FinishReason.LENGTH)
    assert ignored.token_ids == ended.token_ids + (EOS,) * (9 - len(ended.token_ids))
    assert ignored.text == ended.text


def test_forced_tokens_are_not_drafted_if_an_option_says_so() -> None:
    wanted = requests(["regex:true: name(a|b)"] * 2, temperature=1.0)
    forcing, not_forcing = make_engine(), make_engine(force_tokens=False)
    assert decode(forcing, wanted)["0"].token_ids == decode(not_forcing, wanted)["0"].token_ids
    assert forcing.report.num_drafted > 0 == not_forcing.report.num_drafted
