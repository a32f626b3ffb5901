"""What the target chooses behind the newest token of every row, and behind every token of its draft."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from emssd.attention.trees import depths
from emssd.drafting import Draft
from emssd.metrics.timing import phase
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node, choose, greedy_tokens
from emssd.sampling.noise import noise_key
from emssd.sequences import Batch, Sequence

__all__ = ["choices", "drawn_nodes", "first_node", "nodes_of"]

_GREEDY = Node(SamplingParams(temperature=0.0))


@phase("verify")
def choices(logits: torch.Tensor, batch: Batch, draft: Draft) -> torch.Tensor:
    """``[R]`` int64 with ``R = B + num_draft``: the token that each row's `Request.sampling` makes of its logits.

    Where only the model's own logits count, the host waits for nothing. Penalties also read the tokens that lead to a
    node, so that a draft whose ids are on a device is waited for.

    Args:
        logits: ``[R, vocab]``: of each row the logits behind its newest token, then behind each of its drafted tokens.
        batch: the rows.
        draft: trees for these rows; all ids are in the vocabulary.
    """
    if all(_is_greedy(row) for row in batch):
        return greedy_tokens(logits)
    return choose(logits, [node for row, sequence in enumerate(batch) for node in nodes_of(sequence, draft, row)])


def nodes_of(sequence: Sequence, draft: Draft, row: int) -> Iterator[Node]:
    """Where tokens are chosen for `sequence`, row `row` of `draft`: behind its newest token, and each drafted one.

    Those of a row with `residual` sampling are greedy: nobody knows beforehand what `verdicts` will draw there.
    """
    if _is_greedy(sequence):
        yield from [_GREEDY] * (1 + len(draft.tree(row)))
    else:
        yield from drawn_nodes(sequence, draft, row)


def drawn_nodes(sequence: Sequence, draft: Draft, row: int) -> Iterator[Node]:
    """As `nodes_of`, with the params of the request, of a row that is sampled; also by the `residual` method."""
    params, tokens, tree = sequence.request.sampling, sequence.tokens, draft.tree(row)
    assert params is not None
    request = sequence.request
    key, num_prompt = noise_key(params.seed, request.prompt_id, request.sample), len(request.prompt_ids)
    positions = [len(tokens), *(len(tokens) + depth for depth in depths(tree))]
    if not params.reads_prefix:
        yield from (Node(params, key, position) for position in positions)
        return
    drafted = draft.token_ids[draft.indptr[row] : draft.indptr[row + 1]].tolist()
    prefixes = [list(tokens)]
    for token, parent in zip(drafted, tree, strict=True):
        prefixes.append([*prefixes[parent + 1], token])
    for position, prefix in zip(positions, prefixes, strict=True):
        yield Node(params, key, position, prefix, num_prompt)


def first_node(sequence: Sequence) -> Node:
    """Where the token behind the newest one of `sequence` is chosen: there a draft model begins to draw."""
    return next(nodes_of(sequence, Draft.empty(1), 0))


def _is_greedy(sequence: Sequence) -> bool:
    """Whether the model's own logits alone decide what `choices` makes of them."""
    params = sequence.request.sampling
    return params is None or params.is_greedy or params.is_residual
