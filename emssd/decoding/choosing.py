"""The target's choice after the newest token of every row, and after every token of its draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import torch

from emssd.attention.trees import Parents, depths
from emssd.drafting import Draft
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node, choose, greedy_tokens
from emssd.sampling.matching import MatcherState
from emssd.sampling.noise import noise_key
from emssd.sequences import Row

__all__ = ["GREEDY", "choices", "drawn_nodes", "first_node", "states_in"]

GREEDY = Node(SamplingParams(temperature=0.0))
"""Any node of a row that wants greedy tokens alone."""


def choices(logits: torch.Tensor, rows: Iterable[Row], draft: Draft) -> torch.Tensor:
    """``[R]`` int64 with ``R = B + num_draft``: the token that each row's `Request.sampling` makes of its logits.

    Where only the model's own logits count, the host waits for nothing. Penalties also read the tokens that lead to a
    node, so that a draft whose ids are on a device is waited for.

    Args:
        logits: ``[R, vocab]``: of each row the logits after its newest token, then after each of its drafted tokens.
    """
    if all(map(_is_greedy, rows)):
        return greedy_tokens(logits)
    return choose(logits, [node for number, row in enumerate(rows) for node in _nodes_of(row, draft, number)])


def _nodes_of(row: Row, draft: Draft, number: int) -> Iterator[Node]:
    """The nodes at which tokens are chosen for row `number` of `draft`: after its newest token, and each drafted one.

    In a row with `residual` sampling they are greedy: nobody knows beforehand what its rule will draw there.
    """
    if _is_greedy(row):
        yield from [GREEDY] * (1 + len(draft.tree(number)))
    else:
        yield from drawn_nodes(row, draft, number)


def drawn_nodes(row: Row, draft: Draft, number: int) -> Iterator[Node]:
    """As `_nodes_of`, with the params of the request, of a row that is sampled; also by the `residual` method."""
    params, tokens, tree = row.request.sampling, row.tokens, draft.tree(number)
    assert params is not None
    request = row.request
    key, num_prompt = noise_key(params.seed, request.prompt_id, request.sample), len(request.prompt_ids)
    positions = [len(tokens), *(len(tokens) + depth for depth in depths(tree))]
    if not params.reads_path:
        yield from (Node(params, key, position) for position in positions)
        return
    drafted = draft.tokens(number)
    prefixes: list[Seq[int]] = [list(tokens) if params.reads_prefix else ()] * (1 + len(drafted))
    states = _states_of(row.grammar, drafted, tree)
    if params.reads_prefix:
        for node, (token, parent) in enumerate(zip(drafted, tree, strict=True), start=1):
            prefixes[node] = [*prefixes[parent + 1], token]
    for position, prefix, state in zip(positions, prefixes, states, strict=True):
        yield Node(params, key, position, prefix, num_prompt, state)


def _states_of(origin: MatcherState | None, tokens: Seq[int], tree: Parents) -> list[MatcherState | None]:
    """``[1 + n]`` the states after a row's newest token, whose own is `origin`, and after each node of a draft."""
    states = [origin]
    for token, parent in zip(tokens, tree, strict=True):
        above = states[parent + 1]
        states.append(None if above is None else above.after(token))
    return states


def states_in(rows: Iterable[Row], draft: Draft) -> list[MatcherState]:
    """The states after the newest tokens and after all nodes of the draft, of rows with a grammar."""
    states = list[MatcherState | None]()
    for number, row in enumerate(rows):
        if row.grammar is not None:
            states += _states_of(row.grammar, draft.tokens(number), draft.tree(number))
    return [state for state in states if state is not None]


def first_node(row: Row) -> Node:
    """The node at which the token after the newest one of `row` is chosen: there a draft model begins to draw."""
    return next(_nodes_of(row, Draft.empty(1), 0))


def _is_greedy(row: Row) -> bool:
    """Whether the model's own logits alone decide what `choices` makes of them."""
    params = row.request.sampling
    return params is None or params.is_greedy or params.is_residual
