"""Verifies the rows of a batch that are sampled by the `residual` method; see `emssd.sampling.residual`."""

from __future__ import annotations

import torch

from emssd.decoding.choosing import drawn_nodes
from emssd.drafting import Draft
from emssd.metrics.timing import phase
from emssd.sampling.residual import Verdict, verify_deterministic, verify_traversal
from emssd.sampling.residual.probabilities import probabilities
from emssd.sampling.residual.streams import uniforms
from emssd.sequences import Batch

__all__ = ["verdicts"]


@phase("verify")
def verdicts(logits: torch.Tensor, batch: Batch, draft: Draft) -> dict[int, Verdict]:
    """By its index in the batch, what each row with `residual` sampling emits; nothing for other rows.

    A row that was drawn with a known `Draft.q` is verified by traversal. Of any other draft, the tokens that the target
    draws itself are accepted. They are not drawn with the noise of `coupled` sampling: a drafter knows that beforehand,
    so whether there is a ``q`` could depend on it.

    On a GPU, the host waits several times for each node.

    Args:
        logits: ``[B + num_draft, vocab]``: of each row the logits behind its newest token, then behind each of its
            drafted tokens.
        batch: the rows.
        draft: trees for these rows; all ids are in the vocabulary.
    """
    found = dict[int, Verdict]()
    for row, sequence in enumerate(batch):
        params = sequence.request.sampling
        if params is None or not params.is_residual:
            continue
        start, stop = draft.indptr[row], draft.indptr[row + 1]
        nodes = list(drawn_nodes(sequence, draft, row))
        target = probabilities(logits[start + row : stop + row + 1], nodes)
        numbers = uniforms(nodes[0].key, "verify", len(sequence.tokens))
        tokens, q = draft.token_ids[start:stop].tolist(), None if draft.q is None else draft.q[row]
        if q is None:
            found[row] = verify_deterministic(target, (), tokens, draft.tree(row), numbers)
        else:
            found[row] = verify_traversal(target, q, tokens, draft.tree(row), numbers)
    return found
