"""A draft model's draws with the target's noise, and their chances, are those by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any

import pytest
import torch

from emssd.decoding.choosing import first_node
from emssd.draft_models.top_tokens import Choices, after, likely_tokens, on_host
from emssd.native import load_kernels
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node
from emssd.sequences import Request, Row
from tests.support import sampling as reference
from tests.support.tiers import looped

VOCAB = 12
KINDS = [
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=0.7, seed=4),
    SamplingParams(temperature=1.5, top_k=3),
    SamplingParams(top_p=0.5, logit_bias={2: 3.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(presence_penalty=1.0, no_repeat_ngram_size=2),
    None,
]
TEXT = [3, 4, 5, 3, 4]


def top_tokens(*arguments: Any) -> Choices:
    return on_host(likely_tokens(*arguments))


def rows(count: int) -> list[Row]:
    """One of each kind, whose prompts are three tokens."""
    likely = []
    for row in range(count):
        likely.append(Row(Request(f"r{row}", tuple(TEXT[:3]), 20, sampling=KINDS[row % len(KINDS)])))
        likely[-1].extend(TEXT[3:])
    return likely


def logits(count: int) -> torch.Tensor:
    return 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(row: Row, values: Seq[float], path: Seq[int], error: float) -> list[tuple[int, float]]:
    """Tokens that can be drawn, with the logarithm of how likely, the likeliest first."""
    params, prefix = row.request.sampling or SamplingParams(temperature=0.0), [*row.tokens, *path]
    scores = reference.scores(values, params, prefix, 3)
    if params.temperature:
        name, seed = row.request_id, params.seed
        noise = [reference.gumbel(reference.hashed(seed, name, len(prefix), token)) for token in range(VOCAB)]
        scores = [params.temperature * (score + gumbel) for score, gumbel in zip(scores, noise, strict=True)]
    shares = reference.probabilities([score / error for score in scores])
    pairs = [(token, math.log(share)) for token, share in enumerate(shares) if share]
    return sorted(pairs, key=lambda pair: -pair[1])


@pytest.mark.parametrize("path", [[], [7, 3], [4]], ids=str)
@pytest.mark.parametrize("width", [1, 4, 30])
@pytest.mark.parametrize("error", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("block", [2**22, 2 * VOCAB])
def test_the_likeliest_come_first_at_nodes_of_any_kind(
    path: list[int], width: int, error: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emssd.sampling.choice.BLOCK", block)
    sequences, values = rows(3 * len(KINDS)), logits(3 * len(KINDS))
    nodes = [after(first_node(row), len(path), path) for row in sequences]
    tokens, log_probs = top_tokens(values, nodes, width, error)
    for row, likely, shares, line in zip(sequences, tokens, log_probs, values.tolist(), strict=True):
        expected = by_hand(row, line, path, error)[:width]
        assert likely == [token for token, _ in expected]
        assert shares == pytest.approx([share for _, share in expected], rel=1e-9, abs=1e-12)
    assert {len(likely) for likely in tokens} >= {min(width, 3), min(width, VOCAB)}, "what is excluded is not drawn"


def test_greedy_nodes_alone_are_as_they_were() -> None:
    values = logits(4).float()
    assert top_tokens(values, [first_node(rows(7)[6])] * 4, 5, 0.6) == top_tokens(values, None, 5, 0.6)


@looped("bad", [math.nan, math.inf])
@looped("kind", KINDS[:4])
def test_behind_a_model_that_overflowed_nothing_is_drawn(bad: float, kind: SamplingParams) -> None:
    values = logits(2)
    values[0] = bad
    nodes = [first_node(Row(Request(name, (3,), 9, sampling=kind))) for name in "ab"]
    tokens, log_probs = top_tokens(values, nodes, 3)
    assert tokens[0] == log_probs[0] == []
    assert tokens[1] == top_tokens(values[1:], nodes[1:], 3)[0][0] != []


def test_a_node_behind_others_has_their_tokens_only_where_they_are_read() -> None:
    params = SamplingParams(presence_penalty=1.0)
    assert after(Node(params, 7, 5, [1, 2], 1), 2, [8, 9]) == Node(params, 7, 7, [1, 2, 8, 9], 1)
    assert after(Node(SamplingParams(), 7, 5), 2, [8, 9]) == Node(SamplingParams(), 7, 7)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WAYS: list[dict[str, Any]] = [
    {},
    {"top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_draws_are_pytorchs(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, nodes of other kinds between them. The shares are of float32, of float64 if the logits are."""
    generator = torch.Generator().manual_seed(0)
    bound = {"rel": 1e-9, "abs": 1e-9} if dtype is torch.float64 else {"rel": 1e-5, "abs": 1e-4}
    for temperature, width, error, vocab_size in product([0.3, 1.0, 2.5], [1, 4, 20], [0.2, 1.0, 3.0], [7, 64, 1003]):
        values = (3 * torch.randn(6, 2 * vocab_size, generator=generator, dtype=torch.float64)).to(dtype)[
            :, :vocab_size
        ]
        values[3, 1:5] = -math.inf
        params = SamplingParams(temperature, **options)
        other = SamplingParams(temperature, typical_p=0.9)
        nodes = [Node(other if number == 2 else params, 2**63 + number, width) for number in range(6)]
        tokens, log_probs = top_tokens(values, nodes, width, error)
        with monkeypatch.context() as patch:
            patch.setattr("emssd.sampling.choice.loaded_kernels", lambda: None)
            right_tokens, right_log_probs = top_tokens(values, nodes, width, error)
        assert tokens == right_tokens
        for shares, right in zip(log_probs, right_log_probs, strict=True):
            assert shares == pytest.approx(right, **bound)


@pytest.mark.usefixtures("kernels")
@looped("options", WAYS)
@looped("bad", [math.nan, math.inf, -math.inf])
def test_the_kernel_draws_nothing_behind_a_model_that_overflowed(bad: float, options: dict[str, Any]) -> None:
    values = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    values[1] = bad
    values[2, 7] = bad
    nodes = [Node(SamplingParams(**options), 5, position) for position in range(3)]
    tokens, log_probs = top_tokens(values, nodes, 3)
    drawn = [True, False, bad < 0]
    assert [len(row) > 0 for row in tokens] == [len(row) > 0 for row in log_probs] == drawn


@pytest.mark.usefixtures("kernels")
def test_what_the_kernel_cannot_draw_is_refused() -> None:
    places, warps = torch.tensor([0, 1]), torch.ones(2, 4).double()
    draws = load_kernels().top_draws
    assert draws(torch.zeros(2, 5), places, places, places, warps, 1.0, 3).shape == (2, 2, 3)
    for rows, error, width in ((places + 1, 1.0, 3), (places, 0.0, 3), (places, 1.0, 0)):
        with pytest.raises(RuntimeError):
            draws(torch.zeros(2, 5), rows, places, places, warps, error, width)
