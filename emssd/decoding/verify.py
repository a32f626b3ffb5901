"""Decides which drafted tokens the target would have produced itself; pure functions (paper Appendix A)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch

from emssd.attention.transfer import to_host
from emssd.attention.trees import Parents
from emssd.drafting import Draft, Outcome
from emssd.metrics.timing import phase
from emssd.native import loaded_kernels
from emssd.sequences import Batch

__all__ = ["Verification", "greedy_tokens", "verify_greedy"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a draft.

    Attributes:
        accepted: ``[B]`` per row the accepted draft nodes in order, ``range(n)`` for a chain.
        new_tokens: ``[B]`` per row the accepted tokens followed by one token of the target's own: *recovered* where
            a draft token was rejected, *bonus* where all were accepted. Never empty; its length is the acceptance
            length τ.
        target_ids: ``[B]`` per row the target's choice behind its newest token, then behind each node of its draft.
        drafted: ``[num_draft]`` the drafted token ids, now on the host.
        candidates: see `Outcome`.
    """

    accepted: tuple[Seq[int], ...]
    new_tokens: tuple[list[int], ...]
    target_ids: tuple[list[int], ...]
    drafted: tuple[int, ...]
    candidates: tuple[list[list[int]], ...] | None = None

    def outcome(self, batch: Batch, draft: Draft) -> Outcome:
        """What drafters and the budget policy hear."""
        return Outcome(batch, draft, self.accepted, self.target_ids, self.candidates)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """``[R]`` int64: of each row of ``logits [R, vocab]`` the largest entry, of equal ones the first."""
    if logits.device.type == "cpu" and logits.dtype is not torch.float16 and (kernels := loaded_kernels()) is not None:
        best: torch.Tensor = kernels.argmax(logits)  # PyTorch's own takes several times as long on two cores
        return best
    return logits.argmax(dim=-1)


@phase("verify")
def verify_greedy(logits: torch.Tensor, draft: Draft, num_candidates: int = 0) -> Verification:
    """Accept each row's longest way through its tree that equals the target's own argmax (Equations 4 and 5).

    Args:
        logits: ``[R, vocab]`` with ``R = B + num_draft``: of each row the logits after its newest token, then
            after each of its drafted tokens.
        draft: the trees that were verified.
        num_candidates: how many of the target's best tokens a drafter wants to know at every node.
    """
    targets, drafted, best = _on_host(logits, draft, min(num_candidates, logits.shape[1]))
    accepted: list[Seq[int]] = []
    new_tokens: list[list[int]] = []
    target_ids: list[list[int]] = []
    for row, (start, stop) in enumerate(zip(draft.indptr, draft.indptr[1:], strict=False)):
        choices, tokens = targets[start + row : stop + row + 1], drafted[start:stop]
        path = _chain_path(tokens, choices) if draft.parents is None else _path(tokens, draft.tree(row), choices)
        accepted.append(path)
        new_tokens.append([*(tokens[node] for node in path), choices[path[-1] + 1 if path else 0]])
        target_ids.append(choices)
    candidates = None
    if num_candidates:
        ends = [stop + row + 1 for row, stop in enumerate(draft.indptr[1:])]
        candidates = tuple(best[start:stop] for start, stop in pairwise([0, *ends]))
    return Verification(tuple(accepted), tuple(new_tokens), tuple(target_ids), tuple(drafted), candidates)


def _on_host(logits: torch.Tensor, draft: Draft, num_candidates: int) -> tuple[list[int], list[int], list[list[int]]]:
    """The target's choices ``[R]``, the drafted ids ``[num_draft]``, and the best tokens ``[R][num_candidates]``.

    One copy to the host brings everything that the step needs to know, and is the only time that the host waits.
    """
    wanted = [greedy_tokens(logits)]
    if num_candidates:
        wanted.append(logits.topk(num_candidates, dim=-1).indices.flatten())
    if not draft.on_host:
        wanted.append(draft.token_ids)
    host = to_host(torch.cat(wanted) if len(wanted) > 1 else wanted[0])
    num_rows, end = len(logits), len(logits) * (1 + num_candidates)
    drafted = draft.token_ids.tolist() if draft.on_host else host[end:]
    best = [host[at : at + num_candidates] for at in range(num_rows, end, num_candidates or 1)]
    return host[:num_rows], drafted, best


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
