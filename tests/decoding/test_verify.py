"""Verification accepts the longest right beginning of a draft; a sequence grows by it, up to its EOS and its limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention.trees import path
from emssd.decoding.verify import best_tokens, verify
from emssd.draft_models.top_tokens import likely_tokens, on_host
from emssd.drafting import Draft
from emssd.drafting.rule import Verified
from emssd.native import load_kernels
from emssd.sampling.choice import greedy_tokens
from emssd.sequences import FinishReason, Request, Row
from tests.support.tiers import looped
from tests.support.trees import Tree, drawn_trees

VOCAB = 4


@dataclass
class Case:
    chains: list[list[int]]
    targets: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Per row a draft and what the target says after each of its tokens; four tokens make agreement frequent."""
    ids = st.integers(0, VOCAB - 1)
    chains = draw(st.lists(st.lists(ids, max_size=5), min_size=1, max_size=5))
    return Case(chains, [draw(st.lists(ids, min_size=len(c) + 1, max_size=len(c) + 1)) for c in chains])


def flat(targets: list[list[int]]) -> torch.Tensor:
    return torch.tensor([token for row in targets for token in row])


def verified(choices: torch.Tensor, draft: Draft, candidates: torch.Tensor | None = None) -> list[Verified]:
    return verify(choices, [sequence()] * draft.num_rows, draft, candidates)


@given(cases())
def test_accepts_exactly_the_tokens_that_step_by_step_decoding_would_give(case: Case) -> None:
    result = verified(flat(case.targets), Draft.from_chains(case.chains))
    for chain, targets, row in zip(case.chains, case.targets, result, strict=True):
        expected = [targets[0]]
        while len(expected) <= len(chain) and chain[len(expected) - 1] == expected[-1]:
            expected.append(targets[len(expected)])
        assert row.new_tokens == expected
        assert list(row.accepted) == list(range(len(expected) - 1))


@given(cases(), st.integers(1, 6), st.booleans())
def test_candidates_are_the_targets_best_tokens_at_every_node(case: Case, number: int, on_host: bool) -> None:
    generator = torch.Generator().manual_seed(sum(map(len, case.chains)))
    num_logits = sum(len(chain) + 1 for chain in case.chains)
    logits, draft = torch.rand(num_logits, VOCAB, generator=generator), Draft.from_chains(case.chains)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "on_host", property(lambda self: on_host))
        result = verified(greedy_tokens(logits), draft, best_tokens(logits, number))
    assert [len(row.candidates or ()) for row in result] == [len(chain) + 1 for chain in case.chains]
    candidates = [best for row in result for best in row.candidates or ()]
    assert candidates == logits.argsort(dim=1, descending=True)[:, :number].tolist()
    assert [best[0] for best in candidates] == [token for row in result for token in row.target_ids]
    assert [token for row in result for token in row.drafted] == draft.token_ids.tolist()
    assert best_tokens(logits, 0) is None
    assert all(row.candidates is None for row in verified(greedy_tokens(logits), draft))


@given(st.lists(drawn_trees(8, VOCAB), min_size=1, max_size=4), st.data())
def test_of_all_ways_through_a_tree_the_longest_right_one_is_accepted(forest: list[Tree], data: st.DataObject) -> None:
    ids = st.integers(0, VOCAB - 1)
    targets = [data.draw(st.lists(ids, min_size=len(tree) + 1, max_size=len(tree) + 1)) for tree in forest]
    result = verified(flat(targets), Draft.from_trees(forest))
    for tree, choices, row in zip(forest, targets, result, strict=True):
        parents = [parent for _, parent in tree]
        ways = [path(parents, node) for node in range(-1, len(tree))]
        right = [nodes for nodes in ways if all(tree[node][0] == choices[parents[node] + 1] for node in nodes)]
        longest = max(map(len, right))
        expected = next(nodes for nodes in right if len(nodes) == longest)  # of several the one that was drafted first
        assert list(row.accepted) == expected
        assert row.new_tokens == [*(tree[node][0] for node in expected), choices[expected[-1] + 1 if expected else 0]]
    assert [row.target_ids for row in result] == targets
    assert [row.drafted for row in result] == [[token for token, _ in tree] for tree in forest]


@given(drawn_trees(10, 3), st.integers(0, 2**16))
def test_a_trees_tokens_are_those_of_decoding_step_by_step(tree: Tree, seed: int) -> None:
    """The target's choice depends on the tokens before it alone, so equal siblings get equal ones."""
    parents = [parent for _, parent in tree]
    texts = [tuple(tree[ancestor][0] for ancestor in path(parents, node)) for node in range(-1, len(tree))]

    def choice(text: tuple[int, ...]) -> int:
        return hash((seed, text)) % 3

    (row,) = verified(flat([[choice(text) for text in texts]]), Draft.from_trees([tree]))
    expected = [choice(())]
    while tuple(expected) in texts:
        expected.append(choice(tuple(expected)))
    assert row.new_tokens == expected


def test_of_equal_siblings_the_one_with_the_right_child_is_accepted() -> None:
    draft = Draft.from_trees([[(1, -1), (1, -1), (3, 0), (2, 1)]])
    (result,) = verified(flat([[1, 2, 2, 0, 0]]), draft)
    assert result.accepted == [1, 3]
    assert result.new_tokens == [1, 2, 0]


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [5.0, 0.0, 0.0, 5.0]])
    assert verified(greedy_tokens(logits), Draft.from_chains([[1]]))[0].new_tokens == [1, 0]


@looped("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@looped("size", [1, 5, 16, 17, 70])
def test_of_logits_that_are_no_numbers_the_choice_is_torchs(kernels: None, dtype: torch.dtype, size: int) -> None:
    """NaN is the largest of all, of several the first: so `generate` has it."""
    load_kernels()
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(60, size, generator=generator).to(dtype)
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits[torch.rand(60, size, generator=generator) < 0.1] = bad
    logits[0], logits[1], logits[2] = float("nan"), float("-inf"), float("inf")
    assert torch.equal(greedy_tokens(logits), logits.argmax(dim=-1))


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
NEAR = {torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-12}


@looped("dtype", DTYPES)
@looped("size", [1, 3, 16, 17, 100])
@looped("width", [1, 3, 20])
def test_tokens_are_the_largest_in_order_and_shares_those_of_softmax(
    kernels: None, dtype: torch.dtype, size: int, width: int
) -> None:
    load_kernels()
    generator = torch.Generator().manual_seed(size)
    wide = (5 * torch.randn(20, 2 * size, generator=generator, dtype=torch.float64)).to(dtype)
    logits = wide[:, :size]  # rows that lie apart, as those of a larger vocabulary do
    for temperature in (1.0, 0.5, 2.0):
        tokens, log_probs = on_host(likely_tokens(logits, None, width, temperature))
        right = (logits.double() / temperature).log_softmax(dim=1)
        for row, (likely, shares) in enumerate(zip(tokens, log_probs, strict=True)):
            assert len(likely) == len(set(likely)) == len(shares) == min(width, size)
            assert logits[row, likely].tolist() == logits[row].sort(descending=True).values[: len(likely)].tolist()
            assert shares == pytest.approx(right[row, likely].tolist(), abs=NEAR[dtype], rel=NEAR[dtype])


def test_of_equals_the_kernel_takes_the_first(kernels: None) -> None:
    load_kernels()
    logits = torch.zeros(1, 50)
    logits[0, [40, 7, 33]] = 1.0
    assert on_host(likely_tokens(logits, None, 5))[0] == [[7, 33, 40, 0, 1]]


@looped("dtype", DTYPES)
@looped("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_never_hoped_for(kernels: None, dtype: torch.dtype, bad: float) -> None:
    load_kernels()
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0], logits[1, ::2], logits[2, 5] = bad, bad, bad
    tokens, log_probs = on_host(likely_tokens(logits, None, 4))
    assert all(0 <= token < 40 for row in tokens for token in row)
    assert all(not math.isnan(share) and share <= 0 for row in log_probs for share in row)
    assert log_probs[0] == [-math.inf] * 4
    if bad == float("-inf"):
        assert all(token % 2 for token in tokens[1])
        assert sum(map(math.exp, on_host(likely_tokens(logits[1:2], None, 20))[1][0])) == pytest.approx(1.0)
    assert sum(map(math.exp, on_host(likely_tokens(logits[3:], None, 40))[1][0])) == pytest.approx(1.0, abs=1e-3)


def sequence(max_new_tokens: int = 5, eos: frozenset[int] = frozenset({2})) -> Row:
    return Row(Request("a", (7, 2, 8), max_new_tokens, eos))


@looped(
    ("new", "output", "reason"),
    [
        ([4, 5], [4, 5], None),
        ([4, 2], [4, 2], FinishReason.EOS),
        ([2], [2], FinishReason.EOS),
        ([4, 2, 5, 2], [4, 2], FinishReason.EOS),
        ([4, 4, 4, 4, 4], [4, 4, 4, 4, 4], FinishReason.LENGTH),
        ([4, 4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4], FinishReason.LENGTH),
        ([4, 4, 4, 4, 2], [4, 4, 4, 4, 2], FinishReason.EOS),  # both at once: EOS is the reason
        ([4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4], FinishReason.LENGTH),
    ],
)
def test_is_cut_after_the_first_eos_and_at_the_limit(
    new: list[int], output: list[int], reason: FinishReason | None
) -> None:
    row = sequence()
    row.extend(new)
    assert row.output_ids == output
    assert row.tokens == [7, 2, 8, *output]
    assert row.finish_reason is reason
    assert row.num_remaining == 5 - len(output)
