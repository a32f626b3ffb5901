"""A choice is a function of its own logits, params, key and position: the function that is written out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node, choose, scores_of
from emssd.sampling.noise import noise_key
from emssd.sampling.processing import processed
from tests.support import sampling as reference
from tests.support.sampling import params_of_any_kind

VOCAB = 13
MODEL: Any = tiny_model("opt", vocab_size=VOCAB)


@dataclasses.dataclass
class Case:
    logits: torch.Tensor
    nodes: list[Node]
    names: list[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Nodes of several requests; some share their params, and all may stand anywhere."""
    kinds = draw(st.lists(params_of_any_kind(VOCAB), min_size=1, max_size=3))
    nodes, names = [], []
    for _ in range(draw(st.integers(1, 6))):
        params, name = draw(st.sampled_from(kinds)), draw(st.sampled_from(["0", "1", "a"]))
        params = dataclasses.replace(params, seed=draw(st.integers(0, 2)))
        prefix = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14))
        num_prompt = draw(st.integers(1, len(prefix)))
        nodes.append(Node(params, noise_key(params.seed, name), len(prefix), prefix, num_prompt))
        names.append(name)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = torch.randn(len(nodes), VOCAB, generator=generator, dtype=torch.float64)
    return Case(draw(st.sampled_from([1.0, 0.3, 4.0])) * logits, nodes, names)


@given(cases())
def test_choices_are_those_written_out_by_hand(case: Case) -> None:
    chosen = choose(case.logits, case.nodes).tolist()
    for row, node, name, token in zip(case.logits.tolist(), case.nodes, case.names, chosen, strict=True):
        assert token == reference.choice(row, node.params, node.prefix, node.num_prompt, name), node


@given(cases())
def test_processed_logits_are_those_written_out_by_hand(case: Case) -> None:
    for row, node in zip(case.logits, case.nodes, strict=True):
        scores = processed(row[None], node.params, [node.prefix], [node.num_prompt])[0]
        expected = reference.scores(row.tolist(), node.params, node.prefix, node.num_prompt)
        assert scores.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12), node
        assert scores.dtype is torch.float64


@given(cases(), st.randoms(use_true_random=False), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_choice_is_the_same_beside_any_others(case: Case, random: Any, dtype: torch.dtype) -> None:
    logits, order = case.logits.to(dtype), list(range(len(case.nodes)))
    together = choose(logits, case.nodes)
    random.shuffle(order)
    shuffled = choose(logits[order], [case.nodes[row] for row in order])
    assert shuffled.tolist() == together[order].tolist()
    for number, node in enumerate(case.nodes):
        assert choose(logits[number : number + 1], [node]).tolist() == [int(together[number])]


def test_scores_of_a_row_have_the_same_bits_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a vocabulary is no multiple of what a processor computes at once, and rows are cut into blocks."""
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.7, top_k=300, top_p=0.9, min_p=0.001, typical_p=0.95)
    nodes = [Node(params, noise_key(1, "a"), position) for position in range(9)]
    together = scores_of(logits, nodes)
    for row, node in enumerate(nodes):
        assert torch.equal(scores_of(logits[row : row + 1], [node])[0], together[row])
    whole = choose(logits, nodes)
    monkeypatch.setattr("emssd.sampling.choice.BLOCK", 2100)
    assert torch.equal(choose(logits, nodes), whole)


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0, 2.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        assert processed(logits, params).isfinite().tolist() == [[True, True, True, False, True, False]]


def test_of_equal_totals_the_first_wins() -> None:
    params = SamplingParams(temperature=0, logit_bias={1: 1.0, 3: 1.0})
    assert choose(torch.zeros(1, 5), [Node(params)]).tolist() == [1]


@given(params_of_any_kind(VOCAB), st.integers(0, 2**16))
def test_processing_is_that_of_transformers_generate(params: SamplingParams, seed: int) -> None:
    """Processors apply in the order of ``generate``, which has no penalties by count."""
    params = dataclasses.replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    if not params.temperature:
        return
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, VOCAB, generator=generator, dtype=torch.float64)
    prefix = torch.randint(0, VOCAB, (1, 11), generator=generator)
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size")
    config = GenerationConfig(do_sample=True, **{name: getattr(params, name) for name in names})
    if params.logit_bias:
        config.sequence_bias = {(token,): bias for token, bias in params.logit_bias.items()}
    expected = MODEL._get_logits_processor(config, 11, device="cpu")(prefix, logits)
    scores = processed(logits, params, [prefix[0].tolist()], [4])
    assert scores.isfinite().tolist() == expected.isfinite().tolist()
    assert scores[scores.isfinite()].tolist() == pytest.approx(
        expected[expected.isfinite()].tolist(), rel=1e-6, abs=1e-6
    )
