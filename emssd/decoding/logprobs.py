"""Log-probabilities of new tokens, for rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.attention.packed import on_device, to_host
from emssd.decoding.choosing import drawn_nodes
from emssd.drafting import Draft
from emssd.drafting.rule import Verified
from emssd.sampling.choice import BLOCK, Node, alike, processed_at, within_grammars
from emssd.sequences import Row, TokenLogprob

__all__ = ["add_logprobs"]


def add_logprobs(logits: torch.Tensor, draft: Draft, verified: Seq[Verified]) -> None:
    """Set the `Verified.logprobs` of the rows that ask for them.

    Nothing is computed where nobody asks. Else a GPU's host waits once more than without.

    Args:
        logits: ``[R, vocab]``: for each row the logits after its newest token, then after each of its drafted tokens.
    """
    asking = [(place, each, width) for place, each in enumerate(verified) if (width := _width(each.row)) is not None]
    if not asking:
        return
    places, tokens, nodes = list[int](), list[int](), list[Node | None]()
    for place, each, _ in asking:
        start = draft.indptr[place] + place
        places += [start, *(start + 1 + node for node in each.accepted)]
        tokens += each.new_tokens
        nodes += _nodes(each.row, each.new_tokens)
    deepest = max(width for *_, width in asking)
    numbers = iter(_numbers(logits, places, tokens, nodes, deepest))
    for _, each, width in asking:
        each.logprobs = [_logprob(token, next(numbers), width, deepest) for token in each.new_tokens]


def _width(row: Row) -> int | None:
    """The number of most probable tokens that a row wants; ``None`` if it wants no log-probabilities."""
    return None if row.request.sampling is None else row.request.sampling.logprobs


def _nodes(row: Row, new: Seq[int]) -> list[Node | None]:
    """The place of each token of `new`; ``None`` for a row that wants the model's own log-probabilities."""
    params = row.request.sampling
    if params is None or not params.processed_logprobs or params.is_greedy:
        return [None] * len(new)
    return [*drawn_nodes(row, Draft.from_chains([new[:-1]]), 0)]


def _numbers(
    logits: torch.Tensor, places: list[int], tokens: list[int], nodes: list[Node | None], width: int
) -> list[list[float]]:
    """``[n][1 + 2 width]``: for each token, chosen at a row of `logits`, its own, the best ids, and theirs."""
    num_together = max(1, BLOCK // logits.shape[1])
    parts = []
    for start in range(0, len(places), num_together):
        rows, own = (on_device(each[start : start + num_together], logits.device) for each in (places, tokens))
        shares = _scores(logits[rows], nodes[start : start + num_together]).log_softmax(dim=-1)
        best, ids = shares.topk(width, dim=-1)
        parts.append(torch.cat([shares.gather(1, own.unsqueeze(1)), ids.double(), best], dim=1))
    numbers: Seq[float] = to_host(torch.cat(parts).flatten())
    size = 1 + 2 * width
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def _scores(logits: torch.Tensor, nodes: list[Node | None]) -> torch.Tensor:
    """``[n, vocab]`` float64: the `logits`, processed where there is a node."""
    scores = logits.double()
    known = [(place, node) for place, node in enumerate(nodes) if node is not None]
    for block in alike([node for _, node in known], range(len(known)), logits.shape[1]):
        index, own = on_device([known[each][0] for each in block], logits.device), [known[each][1] for each in block]
        scores[index] = processed_at(within_grammars(logits[index], own), own)
    return scores


def _logprob(token: int, numbers: list[float], width: int, deepest: int) -> TokenLogprob:
    ids, shares = map(int, numbers[1 : 1 + width]), numbers[1 + deepest : 1 + deepest + width]
    return TokenLogprob(token, numbers[0], tuple(zip(ids, shares, strict=True)))
