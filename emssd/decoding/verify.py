"""The rule of shared noise: a drafted token is accepted if the target chooses it itself (paper Appendix A)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.attention.packed import to_host
from emssd.attention.trees import Parents
from emssd.decoding.choosing import choices
from emssd.drafting import Draft
from emssd.drafting.rule import VerificationRule, Verified
from emssd.sampling.choice import kernels_for
from emssd.sequences import Row

__all__ = ["SharedNoise", "best_tokens", "verify"]


class SharedNoise(VerificationRule):
    """Accepts the tokens of plain decoding, also where it samples: the noise of a token is a function of its position
    (Daliri et al. 2024, arXiv 2408.07978, §4).
    """

    def verify(
        self, logits: torch.Tensor, rows: Seq[Row], draft: Draft, candidates: torch.Tensor | None = None
    ) -> list[Verified]:
        return verify(choices(logits, rows, draft.within(logits.shape[1])), rows, draft, candidates)


def best_tokens(logits: torch.Tensor, number: int) -> torch.Tensor | None:
    """``[R, number]`` int64: the largest entries of each row of ``logits [R, vocab]``, the largest first.

    ``None`` if `number` is 0; fewer where the vocabulary is smaller.
    """
    if not number:
        return None
    kernels, number = kernels_for(logits), min(number, logits.shape[1])
    if kernels is None:
        return logits.topk(number, dim=-1).indices
    best: torch.Tensor = kernels.top(logits, number, 1.0)[0].long()  # in a third of the time
    return best


def verify(
    choices: torch.Tensor, rows: Seq[Row], draft: Draft, candidates: torch.Tensor | None = None
) -> list[Verified]:
    """Accept each row's longest path through its tree that equals the target's own choices (Equations 4 and 5).

    Args:
        choices: ``[R]`` int64 with ``R = B + num_draft``: the target's token after each row's newest token, then
            after each of its drafted tokens.
        candidates: ``[R, num_candidates]`` int64, the target's best tokens at every node, if a drafter wants to know.
    """
    targets, drafted, best = _on_host(choices, draft, candidates)
    verified = list[Verified]()
    for index, (row, start, stop) in enumerate(zip(rows, draft.indptr, draft.indptr[1:], strict=False)):
        places = slice(start + index, stop + index + 1)
        chosen, tokens = targets[places], drafted[start:stop]
        path = _chain_path(tokens, chosen) if draft.parents is None else _path(tokens, draft.tree(index), chosen)
        new = [*[tokens[node] for node in path], chosen[path[-1] + 1 if path else 0]]
        verified.append(Verified(row, tokens, path, new, chosen, None if candidates is None else best[places]))
    return verified


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


def _chain_path(tokens: list[int], choices: list[int]) -> range:
    """The accepted nodes of a chain: its beginning, as far as it is what the target chooses."""
    for node, (token, choice) in enumerate(zip(tokens, choices, strict=False)):
        if token != choice:
            return range(node)
    return range(len(tokens))


def _path(tokens: list[int], tree: Parents, choices: list[int]) -> list[int]:
    """The accepted nodes of a tree, from its origin down: the deepest path of tokens that the target chooses.

    Children may be drafted twice. So several paths can be right, and the first of the deepest is taken.
    """
    paths: dict[int, list[int]] = {-1: []}
    for node, (token, parent) in enumerate(zip(tokens, tree, strict=True)):
        if parent in paths and token == choices[parent + 1]:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)
