"""Views of trees and chains for tests of drafters."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.attention.trees import Parents
from emssd.drafting import Draft, Drafter
from emssd.drafting.checked import check_draft
from emssd.sequences import Batch, Request, Row

__all__ = ["chains_of", "paths", "paths_of", "row_of", "tree_of"]


def row_of(prompt: Seq[int], output: Seq[int] = (), name: str = "a", max_new_tokens: int = 100) -> Row:
    """A row whose prompt is `prompt`, and that has generated `output`."""
    return Row(Request(name, tuple(prompt), max_new_tokens), [*prompt, *output])


def chains_of(draft: Draft) -> list[list[int]]:
    """The token ids of each row of a draft."""
    tokens = draft.token_ids.tolist()
    return [tokens[start:stop] for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)]


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
    """The draft of `drafter` for one row, tested against the rules."""
    batch = Batch((row,))
    draft = drafter.propose(batch, [budget])
    check_draft(draft, batch, [budget], vocab_size, trees=drafter.drafts_trees)
    return draft
