"""What tests of drafters ask of their trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

from emssd.attention import PagedBackend
from emssd.attention.trees import Parents
from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import check_draft
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Batch, Request, Row
from emssd.testing.models import tiny_model
from emssd.testing.oracle import References
from tests.support.reference_kernels import ReferenceKernels

__all__ = ["decode_with_trees", "paths", "paths_of", "row_of", "tree_of"]


def row_of(prompt: Seq[int], output: Seq[int] = (), name: str = "a", max_new_tokens: int = 100) -> Row:
    """A row whose prompt is `prompt`, and that has generated `output`."""
    return Row(Request(name, tuple(prompt), max_new_tokens), [*prompt, *output])


def paths(token_ids: Seq[int], parents: Parents) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of a tree, the node's own last."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(token_ids, parents, strict=True):
        found.append(((*found[parent], token)) if parent >= 0 else (token,))
    return found


def paths_of(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    """The same for a row of a draft."""
    return paths(draft.token_ids[draft.indptr[row] : draft.indptr[row + 1]].tolist(), draft.tree(row))


def tree_of(drafter: Drafter, row: Row, budget: int, vocab_size: int = 99) -> Draft:
    """What `drafter` drafts for one row, held to the rules."""
    batch = Batch((row,))
    draft = drafter.propose(batch, [budget])
    check_draft(draft, batch, [budget], vocab_size, trees=drafter.drafts_trees)
    return draft


def decode_with_trees(drafter: Drafter | Seq[Drafter], prompts: Seq[Seq[int]], num_new: int = 30) -> Engine:
    """Decode `prompts` on paged kernels in float64, few rows at a time; every token must be that of plain greedy.

    Returns:
        The engine, idle, with its report.

    Raises:
        AssertionError: a token differs.
    """
    references = _references()
    spec = replace(references.target.kv_cache_spec(3), continuous=True, trees=True)
    backend = PagedBackend(ReferenceKernels(), page_size=3)
    assert not backend.unsupported(spec)
    backend.allocate(spec)
    engine = Engine(
        CausalLMRunner(references.target, backend), drafter, batch_size=3, budget=FixedBudget(), on_drafter_error="fail"
    )
    for prompt, done in zip(prompts, engine.generate(prompts, num_new), strict=True):
        expected = references[tuple(prompt)][:num_new]
        assert done.token_ids == expected, f"{prompt} got {done.token_ids} in the place of {expected}"
    return engine


@cache
def _references() -> References:
    return References(TargetModel(tiny_model("llama", vocab_size=11, max_model_len=144, std=0.12)), 60)
