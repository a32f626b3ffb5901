"""The kernel's choices are PyTorch's: the same noise to the bit, and the same token at every node.

The oracle is `choose` without kernels. Ties go to the first token, in float32, bfloat16 and float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.native import load_kernels
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node, choose
from emssd.sampling.noise import gumbel, hashed, noise_key, noise_state
from tests.support.sampling import params_of_any_kind
from tests.support.tiers import looped

pytestmark = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
KEYS = st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


def by_pytorch(logits: torch.Tensor, nodes: Seq[Node]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emssd.sampling.choice.loaded_kernels", lambda: None)
        return choose(logits, nodes).tolist()


def signed(values: Seq[int]) -> torch.Tensor:
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in values], dtype=torch.int64)


def drawn(logits: torch.Tensor, nodes: Seq[Node]) -> list[int]:
    """The kernel's own choices; -1 where it leaves the choice to PyTorch."""
    warps = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in (node.params for node in nodes)]
    keys, positions = signed([node.key for node in nodes]), signed([node.position for node in nodes])
    rows = torch.arange(len(nodes))
    tokens: list[int] = load_kernels().sample(logits, rows, keys, positions, torch.tensor(warps).double()).tolist()
    return tokens


def nodes_with(params: SamplingParams, number: int, name: str = "a") -> list[Node]:
    return [Node(params, noise_key(params.seed, name), position) for position in range(number)]


@given(st.lists(st.tuples(KEYS, st.integers(0, 2**40)), min_size=1, max_size=40), st.integers(1, 200))
def test_the_random_bits_are_those_of_the_hash(places: list[tuple[int, int]], vocab_size: int) -> None:
    keys, positions = signed([key for key, _ in places]), signed([position for _, position in places])
    expected = hashed([noise_state(*point) for point in places], vocab_size, CPU)
    assert torch.equal(load_kernels().noise_bits(keys, positions, vocab_size), expected)


@st.composite
def quick_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Temperature, top-k, top-p and min-p, with limits that equal shares of small wholes meet exactly."""
    share = st.sampled_from([0.5, 0.25, 0.75, 0.9, 0.1, 1e-9, 1 - 1e-9]) | st.floats(0.01, 0.99)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.8, 1.0, 0.3, 2.0, 1, 1e-6, 1e4, 1e9]) | st.floats(0.05, 20)),
        top_k=draw(st.just(0) | st.integers(1, 5) | st.integers(1, vocab_size + 2)),
        top_p=draw(st.just(1.0) | share),
        min_p=draw(st.just(0.0) | share | st.just(1.0)),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def logits_of_any_kind(draw: st.DrawFn, rows: int, vocab_size: int) -> torch.Tensor:
    """Flat, peaked, equal, far apart, forbidden and overflowed ones; as rows of a wider tensor or by themselves."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    values *= draw(st.sampled_from([1.0, 0.0, 0.1, 5.0, 30.0, 1e6, 1e12]))
    if draw(st.booleans()):
        values = values.round() * draw(st.sampled_from([1.0, math.log(2)]))
    for row in range(rows):
        bad = draw(st.sampled_from([None, None, None, -math.inf, -math.inf, math.inf, math.nan]))
        if bad is not None:
            values[row, torch.rand(vocab_size, generator=generator) < draw(st.sampled_from([0.1, 0.9, 1.0]))] = bad
    values = values.to(draw(st.sampled_from(DTYPES)))
    wide = torch.cat([values, torch.full_like(values, 9.0)], dim=1)
    return wide[:, :vocab_size] if draw(st.booleans()) else values


@given(st.data())
def test_the_kernel_chooses_as_pytorch_does(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 20) | st.integers(50, 300))
    rows = data.draw(st.integers(1, 5))
    logits = data.draw(logits_of_any_kind(rows, vocab_size))
    name = data.draw(st.sampled_from("abcdef"))
    nodes = [nodes_with(data.draw(quick_params(vocab_size)), 30, name)[data.draw(st.integers(0, 29))] for _ in logits]
    assert choose(logits, nodes).tolist() == by_pytorch(logits, nodes)


@given(st.data())
def test_other_options_choose_as_in_pytorch(data: st.DataObject) -> None:
    """Nodes of all kinds in one batch, greedy ones included; the noise is the kernel's also after penalties."""
    logits = data.draw(logits_of_any_kind(3, 13))
    nodes = []
    for _ in logits:
        params = data.draw(params_of_any_kind(13) | quick_params(13))
        prefix = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
        nodes.append(Node(params, noise_key(params.seed, "a"), len(prefix), prefix, 1))
    assert choose(logits, nodes).tolist() == by_pytorch(logits, nodes)


WAYS: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.6}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_millions_of_draws_are_pytorchs_and_none_is_left_to_it(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """2 million draws of noise for each case, 30 million in all; half of them with many logits that are equal."""
    generator = torch.Generator().manual_seed(0)
    for scale, rows, vocab_size in ((0.5, 30, 32_000), (4.0, 1000, 1000)):
        logits = (scale * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)).to(dtype)
        nodes = nodes_with(SamplingParams(temperature=0.8, **options), rows)
        chosen = drawn(logits, nodes)
        assert -1 not in chosen
        assert chosen == by_pytorch(logits, nodes)


def test_totals_that_are_too_near_are_left_to_pytorch() -> None:
    """The second token's logit brings its total within some ulps of the first one's."""
    nodes = nodes_with(SamplingParams(), 200)
    noise = gumbel([noise_state(node.key, node.position) for node in nodes], 5, CPU)
    logits = torch.full((200, 5), -30.0, dtype=torch.float64)
    logits[:, 1], logits[:, 3] = 0.0, noise[:, 1] - noise[:, 3]
    assert drawn(logits, nodes) == [-1] * 200
    assert choose(logits, nodes).tolist() == by_pytorch(logits, nodes)
    logits[:, 3] += 1e-9
    assert drawn(logits, nodes) == [3] * 200 == by_pytorch(logits, nodes)
    logits[:, 3] -= 2e-9
    assert drawn(logits, nodes) == [1] * 200 == by_pytorch(logits, nodes)


@looped(
    ("params", "unsure"),
    [
        (SamplingParams(top_p=0.5), {1}),  # the first token has half
        (SamplingParams(top_p=0.75), {2}),
        (SamplingParams(min_p=0.5), {1}),
        (SamplingParams(top_k=2, top_p=2 / 3), {1}),
        (SamplingParams(top_k=2, top_p=2 / 3 + 1e-4), set()),
    ],
)
def test_limits_that_are_met_exactly_are_left_to_pytorch(params: SamplingParams, unsure: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).double().log().expand(300, 4)
    nodes = nodes_with(params, 300)
    right = by_pytorch(logits, nodes)
    chosen = drawn(logits, nodes)
    assert all(token in (-1, other) for token, other in zip(chosen, right, strict=True))
    assert (-1 in chosen) == bool(unsure)
    assert not unsure & set(chosen)
    assert choose(logits, nodes).tolist() == right


@looped("dtype", DTYPES)
@looped("bad", [math.nan, math.inf])
def test_rows_that_overflowed_are_left_to_pytorch_and_others_are_not(dtype: torch.dtype, bad: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[1, 99], logits[2, 3] = bad, bad
    nodes = nodes_with(SamplingParams(top_k=5), 4)
    chosen = drawn(logits, nodes)
    assert [token < 0 for token in chosen] == [False, True, True, False]
    assert choose(logits, nodes).tolist() == by_pytorch(logits, nodes)


def test_the_choice_does_not_depend_on_the_number_of_threads() -> None:
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(3))
    nodes = nodes_with(SamplingParams(top_p=0.8, min_p=0.01), 9)
    alone = drawn(logits, nodes)
    torch.set_num_threads(2)
    assert drawn(logits, nodes) == alone


def test_what_does_not_fit_is_refused() -> None:
    logits, places, warps = torch.zeros(2, 5), torch.tensor([0, 1]), torch.ones(2, 4).double()
    sample = load_kernels().sample
    assert sample(logits, places, places, places, warps).shape == (2,)
    for wrong in (torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with pytest.raises(RuntimeError, match="there is no row"):
            sample(logits, wrong, places, places, warps)
    for given_wrong in (
        (logits, places, places[:1], places, warps),
        (logits, places, places, places.int(), warps),
        (logits, places, places, places, warps[:1]),
        (logits, places, places, places, warps.float()),
        (logits.half(), places, places, places, warps),
        (logits.T.contiguous().T, places, places, places, warps),
    ):
        with pytest.raises(RuntimeError):
            sample(*given_wrong)
