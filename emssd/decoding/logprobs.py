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
    wanted = [
        (start + number, result, width)
        for number, (start, result) in enumerate(zip(draft.indptr, verified, strict=False))
        if (width := _width(result.row)) is not None
    ]
    if not wanted:
        return
    lines, tokens, nodes = list[int](), list[int](), list[Node | None]()  # lines of `logits`
    for first, result, _ in wanted:
        lines += [first, *(first + 1 + node for node in result.accepted)]
        tokens += result.new_tokens
        nodes += _nodes(result.row, result.new_tokens)
    deepest = max(width for *_, width in wanted)
    numbers = iter(_numbers(logits, lines, tokens, nodes, deepest))
    for _, result, width in wanted:
        result.logprobs = [_logprob(token, next(numbers), width, deepest) for token in result.new_tokens]


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
    logits: torch.Tensor, lines: list[int], tokens: list[int], nodes: list[Node | None], width: int
) -> list[list[float]]:
    """``[n][1 + 2 width]``: for each token, chosen at a line of `logits`, its own, the best ids, and theirs."""
    num_together, parts = max(1, BLOCK // logits.shape[1]), []
    for start in range(0, len(lines), num_together):
        block = slice(start, start + num_together)
        shares = _scores(logits[on_device(lines[block], logits.device)], nodes[block]).log_softmax(dim=-1)
        best, ids = shares.topk(width, dim=-1)
        chosen = on_device(tokens[block], logits.device).unsqueeze(1)
        parts.append(torch.cat([shares.gather(1, chosen), ids.double(), best], dim=1))
    numbers: Seq[float] = to_host(torch.cat(parts).flatten())
    size = 1 + 2 * width
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def _scores(logits: torch.Tensor, nodes: list[Node | None]) -> torch.Tensor:
    """``[n, vocab]`` float64: the `logits`, processed where there is a node."""
    scores = logits.double()
    by_line = {line: node for line, node in enumerate(nodes) if node is not None}
    for block in alike(by_line, [*by_line], logits.shape[1]):
        index, some = on_device(block, logits.device), [by_line[line] for line in block]
        scores[index] = processed_at(within_grammars(logits[index], some), some)
    return scores


def _logprob(token: int, numbers: list[float], width: int, deepest: int) -> TokenLogprob:
    ids, shares = map(int, numbers[1 : 1 + width]), numbers[1 + deepest : 1 + deepest + width]
    return TokenLogprob(token, numbers[0], tuple(zip(ids, shares, strict=True)))
