"""What a drafter proposes (`Draft`), what it hears back (`Outcome`), and the `Drafter` interface itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import DraftError
from emssd.transfer import on_device

if TYPE_CHECKING:
    from emssd.attention import AttentionBackend, KVCacheSpec
    from emssd.model import TargetModel
    from emssd.sequence import Batch

__all__ = ["Draft", "Drafter", "DrafterContext", "Outcome", "check_draft", "check_ids", "own_draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of a whole batch: one token tree per row, ragged, a chain being the special case.

    Row ``i`` holds nodes ``indptr[i]:indptr[i + 1]``.

    Attributes:
        token_ids: ``[num_draft]`` int64, on any device.
        indptr: ``[B + 1]`` host integers with a leading zero.
        parents: ``[num_draft]`` host integers, for each node the index *within its row* of its parent, ``-1`` for
            a child of the sequence's newest token; a parent comes before its children. ``None``: every row is a
            chain.
        probs: ``[num_draft, vocab]`` the drafter's distribution at each node; ``None`` means a deterministic
            drafter. Greedy verification does not read it.
        confidence: ``[num_draft]`` host floats in 0..1, how sure the drafter is of each node, given that those before
            it are right; on any scale of its own, for budget policies; `adaptive` does not read it. ``None``: it
            does not know.
    """

    token_ids: torch.Tensor
    indptr: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probs: torch.Tensor | None = None
    confidence: tuple[float, ...] | None = None

    @classmethod
    def from_chains(cls, chains: Iterable[Seq[int]]) -> Draft:
        """A draft of one chain of token ids per row; an empty chain drafts nothing."""
        token_ids: list[int] = []
        indptr = [0]
        for chain in chains:
            token_ids.extend(chain)
            indptr.append(len(token_ids))
        return cls(torch.tensor(token_ids, dtype=torch.int64), tuple(indptr))

    @classmethod
    def empty(cls, num_rows: int) -> Draft:
        """A draft of nothing for `num_rows` rows."""
        return cls(torch.empty(0, dtype=torch.int64), (0,) * (num_rows + 1))

    @property
    def num_rows(self) -> int:
        """Rows of the batch that this draft is for."""
        return len(self.indptr) - 1

    @property
    def lengths(self) -> list[int]:
        """Number of drafted tokens of each row."""
        return [stop - start for start, stop in zip(self.indptr, self.indptr[1:], strict=False)]

    def cut(self, lengths: Seq[int]) -> Draft:
        """The first `lengths` tokens of each row's chain, ``[B]``."""
        if list(lengths) == self.lengths:
            return self
        kept = [range(start, start + length) for start, length in zip(self.indptr, lengths, strict=False)]
        nodes = on_device([node for row in kept for node in row], self.token_ids.device)
        return Draft(
            token_ids=self.token_ids[nodes],
            indptr=(0, *accumulate(lengths)),
            probs=None if self.probs is None else self.probs[nodes],
            confidence=None if self.confidence is None else tuple(self.confidence[i] for row in kept for i in row),
        )

    @property
    def on_host(self) -> bool:
        """Whether the host can read the ids without waiting for a device."""
        return self.token_ids.device.type == "cpu"

    def within(self, vocab_size: int) -> Draft:
        """The same with ids that the host has not seen forced into the vocabulary, so that nobody reads beyond a table.

        An id that this changes was no token of the target's, so what is verified is still the draft itself.
        """
        if self.on_host:
            return self
        return replace(self, token_ids=self.token_ids.clamp(0, vocab_size - 1))

    @property
    def is_chain(self) -> bool:
        """Whether every row is a chain."""
        if self.parents is None:
            return True
        lengths = self.lengths
        return self.parents == tuple(node - 1 for length in lengths for node in range(length))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft; the batch has already been extended when a drafter receives it.

    Attributes:
        batch: the batch that was drafted for, finished rows included.
        draft: what was verified: of each row's draft the beginning, all of it or less, as the budget policy decided.
        accepted: per row the accepted nodes of its draft, as indices within the row, in order; for a chain
            ``range(n)``. What an EOS or a length limit later cut off the sequence is not taken out here.
    """

    batch: Batch
    draft: Draft
    accepted: tuple[Seq[int], ...]


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may need to know or to borrow when it is built; handed to the plugin's ``build``.

    Attributes:
        vocab_size: drafted ids must be below it.
        max_model_len: no sequence grows beyond it.
        max_batch_size: largest number of rows of a batch.
        device, dtype: where and in which precision the target computes.
        tokenizer: the target's tokenizer, if there is one.
        load_model: ``load_model(path)`` gives a further model, ready to run, and its tokenizer (or ``None``).
        make_backend: ``make_backend(spec)`` gives a further attention backend of the kind the target uses. It is
            allocated once all drafters are built, as they share one limit of memory: use it from `propose` on.
        make_drafter: ``make_drafter(name, options)`` gives a further drafter, for those that combine others.
    """

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    load_model: Callable[[str], tuple[TargetModel, Any]]
    make_backend: Callable[[KVCacheSpec], AttentionBackend]
    make_drafter: Callable[[str, Mapping[str, Any]], Drafter]


class Drafter(ABC):
    """Guesses the next tokens of every sequence of a batch. It can change the speed, never the output.

    Attributes:
        num_speculative_tokens: the most tokens this drafter proposes for one row in one step.
    """

    num_speculative_tokens: int = 0

    @abstractmethod
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """Draft for every row of `batch`.

        Args:
            batch: the rows of this step, which can be read only.
            budget: ``[B]`` the most tokens to draft for each row; 0 means none. Fewer, or none, is always fine.

        Returns:
            A `Draft` with one row per row of the batch and ids below the vocabulary size.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn what was accepted: roll back an own cache, adapt.

        Called once after every step. A step that fails has none: its rows are proposed for again, as they were.
        """

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests. Unknown ids are no error.

        A request that comes again was preempted: it begins anew, with the tokens that it had.
        """

    def forget(self) -> None:
        """Drop what was learnt across requests, while none runs.

        Called after a warm-up, which decodes the beginning of what is about to be timed. Of use to those only that
        keep something of a request that was released.
        """


def check_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int) -> None:
    """Hold a drafter to its interface.

    Raises:
        DraftError: token ids that are no flat int64 tensor, wrong number of rows, more than the budget, a tree,
            probabilities or confidence of other tokens, or, where they lie on the host, ids outside the vocabulary.
    """
    if draft.token_ids.dtype != torch.int64 or draft.token_ids.ndim != 1:
        raise DraftError(
            f"its token_ids are {draft.token_ids.dtype} of {draft.token_ids.ndim} dimensions; "
            f"give one int64 tensor of all rows' tokens"
        )
    if draft.num_rows != len(batch) or draft.indptr[0] != 0 or draft.indptr[-1] != draft.token_ids.numel():
        raise DraftError(
            f"its draft has {draft.num_rows} rows over {draft.token_ids.numel()} tokens (indptr {draft.indptr}), "
            f"but the batch has {len(batch)} rows; return one chain, possibly empty, per row"
        )
    for sequence, length, limit in zip(batch, draft.lengths, budget, strict=True):
        if not 0 <= length <= limit:
            raise DraftError(
                f"it drafted {length} tokens for request {sequence.request_id!r} with a budget of {limit}; "
                f"draft at most budget[row] tokens"
            )
    if not draft.is_chain:
        raise DraftError("it drafted a token tree, and only chains are verified so far; draft one chain per row")
    for name, values in (("probs", draft.probs), ("confidence", draft.confidence)):
        if values is not None and len(values) != draft.token_ids.numel():
            raise DraftError(
                f"its {name} are of {len(values)} tokens, and it drafted {draft.token_ids.numel()}; give one for each"
            )
    if draft.on_host:
        check_ids(draft.token_ids.tolist(), vocab_size)


def own_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int) -> Draft:
    """A copy of `draft` that nobody else can write to, held to the interface; see `check_draft`.

    Raises:
        DraftError: it is no `Draft`, or breaks a rule.
    """
    if not isinstance(draft, Draft):
        raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.draft.Draft")
    if not isinstance(draft.token_ids, torch.Tensor):
        raise DraftError(f"its token_ids are a {type(draft.token_ids).__name__}; give one int64 tensor")
    if draft.token_ids.is_meta:
        raise DraftError("its token_ids are on the device meta, where tensors hold nothing; give ids")
    own = Draft(
        token_ids=draft.token_ids.clone(),
        indptr=tuple(map(index, draft.indptr)),
        parents=None if draft.parents is None else tuple(map(index, draft.parents)),
        probs=draft.probs,
        confidence=None if draft.confidence is None else tuple(draft.confidence),
    )
    check_draft(own, batch, budget, vocab_size)
    return own


def check_ids(token_ids: Seq[int], vocab_size: int) -> None:
    """Hold a drafter to the vocabulary; its ids on a device are checked when verification brings them to the host.

    Raises:
        DraftError: an id is outside of it.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise DraftError(
            f"it drafted token id {low if low < 0 else high}, outside the target's vocabulary "
            f"of {vocab_size}; ids must be in 0..{vocab_size - 1}"
        )
