"""Decides which drafted tokens the target would have chosen itself; pure functions (paper Appendix A)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from emssd.attention.packed import to_host
from emssd.attention.trees import Parents
from emssd.drafting import Draft
from emssd.sampling.choice import greedy_tokens
from emssd.sampling.residual import Verdict
from emssd.sequences import TokenLogprob

__all__ = ["Verified", "best_tokens", "greedy_tokens", "verify"]


@dataclass(slots=True)
class Verified:
    """The result of verifying the draft of one row.

    Attributes:
        drafted: ``[n]`` the drafted token ids, now on the host.
        accepted: the accepted draft nodes in order, ``range(n)`` for a chain.
        new_tokens: the accepted tokens followed by one token of the target's own: *recovered* where a draft token was
            rejected, *bonus* where all were accepted. Its length is the acceptance length τ.
        target_ids: ``[1 + n]`` the target's choice after the row's newest token, then after each node of its draft.
        candidates: ``[1 + n]`` at the same places the target's best tokens, if a drafter wants them.
        logprobs: of `new_tokens`, if the request asks for them.
    """

    drafted: list[int]
    accepted: Seq[int]
    new_tokens: list[int]
    target_ids: list[int]
    candidates: list[list[int]] | None = None
    logprobs: Seq[TokenLogprob] = ()


def best_tokens(logits: torch.Tensor, number: int) -> torch.Tensor | None:
    """``[R, number]`` int64: the largest entries of each row of ``logits [R, vocab]``, the largest first.

    ``None`` if `number` is 0; fewer where the vocabulary is smaller.
    """
    return logits.topk(min(number, logits.shape[1]), dim=-1).indices if number else None


def verify(
    choices: torch.Tensor,
    draft: Draft,
    candidates: torch.Tensor | None = None,
    verdicts: Mapping[int, Verdict] | None = None,
) -> list[Verified]:
    """Accept each row's longest way through its tree that equals the target's own choices (Equations 4 and 5).

    It does not matter how these were made: with noise that is a function of the position, what is accepted is what
    sampling without a draft would have given (Daliri et al., arXiv 2408.07978, §4).

    Args:
        choices: ``[R]`` int64 with ``R = B + num_draft``: the target's token after each row's newest token, then
            after each of its drafted tokens.
        candidates: ``[R, num_candidates]`` int64, the target's best tokens at every node, if a drafter wants to know.
        verdicts: by row, those that were decided already; there, only drafters get `choices`.
    """
    targets, drafted, best = _on_host(choices, draft, candidates)
    found = list[Verified]()
    for row, (start, stop) in enumerate(zip(draft.indptr, draft.indptr[1:], strict=False)):
        places = slice(start + row, stop + row + 1)
        chosen, tokens = targets[places], drafted[start:stop]
        path: Seq[int]
        if verdicts and row in verdicts:
            path = verdicts[row].path
            _tell(chosen, tokens, verdicts[row])
        else:
            path = _chain_path(tokens, chosen) if draft.parents is None else _path(tokens, draft.tree(row), chosen)
        new = [*[tokens[node] for node in path], chosen[path[-1] + 1 if path else 0]]
        found.append(Verified(tokens, path, new, chosen, None if candidates is None else best[places]))
    return found


def _on_host(
    choices: torch.Tensor, draft: Draft, candidates: torch.Tensor | None
) -> tuple[list[int], list[int], list[list[int]]]:
    """The target's choices ``[R]``, the drafted ids ``[num_draft]``, and the best tokens ``[R][num_candidates]``.

    One copy to the host brings everything that the step needs to know, and is the only time that the host waits.
    """
    on_host, number = draft.on_host, 0 if candidates is None else candidates.shape[1]
    others = [] if candidates is None else [candidates.flatten()]
    if not on_host:
        others.append(draft.token_ids)
    if not others:
        chosen, host = to_host(choices), list[int]()
    elif choices.device.type == "cpu" and choices.is_pinned():
        host = to_host(torch.cat(others))
        chosen = choices.tolist()  # these have come before
    else:
        host = to_host(torch.cat([*others, choices]))
        chosen = host[len(host) - len(choices) :]
    end = len(chosen) * number
    drafted = draft.token_ids.tolist() if on_host else host[end : end + draft.indptr[-1]]
    return chosen, drafted, [host[at : at + number] for at in range(0, end, number)] if number else []


def _tell(choices: list[int], tokens: list[int], verdict: Verdict) -> None:
    emitted = [*(tokens[node] for node in verdict.path), verdict.token]
    for place, token in zip([0, *(node + 1 for node in verdict.path)], emitted, strict=True):
        choices[place] = token


def _chain_path(tokens: list[int], choices: list[int]) -> range:
    """The accepted nodes of a chain: its beginning, as far as it is what the target chooses."""
    for node, (token, choice) in enumerate(zip(tokens, choices, strict=False)):
        if token != choice:
            return range(node)
    return range(len(tokens))


def _path(tokens: list[int], tree: Parents, choices: list[int]) -> list[int]:
    """The accepted nodes of a tree, from its origin down: the deepest of those that the target chooses, all the way.

    Children may be drafted twice. So several ways can be right, and the first of the deepest is taken.
    """
    paths: dict[int, list[int]] = {-1: []}
    for node, (token, parent) in enumerate(zip(tokens, tree, strict=True)):
        if parent in paths and token == choices[parent + 1]:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)
