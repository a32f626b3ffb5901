"""The border to a drafter: what it returns is copied and checked, and a fault of its own never costs a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from operator import index

import numpy as np
import torch

from emssd.attention.trees import depths
from emssd.drafting.budget import GoesOn
from emssd.drafting.draft import Draft, Outcome, checked_layers
from emssd.drafting.drafter import Drafter
from emssd.errors import ConfigError, DraftError, PluginError, PluginWarning
from emssd.errors.faults import guarded, told
from emssd.sequences import Batch

__all__ = ["CheckedDrafter", "check_draft", "check_ids", "own_draft"]


class CheckedDrafter(Drafter):
    """Calls a drafter, checks its drafts, and switches it off, or raises, when it fails.

    Args:
        drafter: what to call.
        name: how messages call the plugin it comes from.
        vocab_size: of the target.
        on_error: ``"disable"`` warns and drafts nothing from then on; ``"fail"`` raises.

    Attributes:
        drafts_trees: whether it may draft trees, as it said at first: the KV cache is made for that.
        hidden_layers: which hidden states it wants, as it said at first: the target is made ready for that.

    Raises:
        PluginError: it fails while these are read. DraftError: its `hidden_layers` cannot be.
    """

    def __init__(self, drafter: Drafter, name: str | None, vocab_size: int, *, on_error: str = "disable") -> None:
        if on_error not in ("disable", "fail"):
            raise ConfigError(f"on_drafter_error is {on_error!r}; choose disable or fail")
        self.drafter = drafter
        self.name = type(drafter).__name__ if name is None else f"{name}"
        self._owner = f"drafter {self.name}"
        with guarded(f"drafter {self.name}", "drafts_trees"):
            self.drafts_trees = bool(drafter.drafts_trees)
        try:
            with guarded(f"drafter {self.name}", "hidden_layers"):
                self.hidden_layers = checked_layers(drafter.hidden_layers)
        except DraftError as error:
            raise DraftError(f"drafter {self.name} broke its interface: {told(error)}") from error
        self.failure: PluginError | None = None
        self.num_drafted = self.num_accepted = 0
        self._vocab_size = vocab_size
        self._on_error = on_error

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # read-only: the drafter's own, 0 if it failed
        """The most tokens it proposes for one row in one step."""
        return self._count("num_speculative_tokens")

    @property
    def num_candidates(self) -> int:  # type: ignore[override]  # read-only: the drafter's own, 0 if it failed
        """The number of the target's best tokens that it wants."""
        return self._count("num_candidates")

    def _count(self, name: str) -> int:
        with guarded(self._owner, name, in_step=True, failed=self._fail):
            number = 0 if self.failure else getattr(self.drafter, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise DraftError(f"its {name} is {number!r}; it must be an integer, at least 0")
            return number
        return 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """A draft that keeps the rules of the interface; empty once the drafter has failed.

        It is a copy: the drafter may change its own later, and the same tokens are packed and verified.

        Raises:
            DraftError: it broke a rule, with ``on_error="fail"``. PluginError: it raised.
        """
        if self.failure or not batch.rows:
            return Draft.empty(len(batch))
        limits = tuple(budget)
        with guarded(self._owner, "propose", in_step=True, failed=self._fail):
            draft = self.drafter.propose(batch, limits)
            return own_draft(draft, batch, limits, self._vocab_size, trees=self.drafts_trees)
        return Draft.empty(len(batch))

    def end_by(self, goes_on: GoesOn | None) -> None:
        """Pass it on."""
        with guarded(self._owner, "end_by", in_step=True, failed=self._fail):
            self.drafter.end_by(goes_on)

    def check_ids(self, drafted: Seq[int]) -> None:
        """Check ids that were drafted on a device, now that they have come to the host; none of these was accepted."""
        try:
            check_ids(drafted, self._vocab_size)
        except DraftError as error:
            self._fail(error)

    def observe(self, outcome: Outcome) -> None:
        """Pass the outcome on, with the hidden states that the drafter wants."""
        if self.failure or not (outcome.batch.rows or (self.hidden_layers and outcome.hidden is not None)):
            return
        self.num_drafted += outcome.draft.indptr[-1]
        self.num_accepted += sum(map(len, outcome.accepted))
        with guarded(self._owner, "observe", in_step=True, failed=self._fail):
            hidden = outcome.hidden.of(self.hidden_layers) if outcome.hidden and self.hidden_layers else None
            self.drafter.observe(outcome if hidden is outcome.hidden else replace(outcome, hidden=hidden))

    def release(self, request_ids: Iterable[str]) -> None:
        """Pass it on, also to a drafter that failed, which may still hold something of these requests."""
        with guarded(self._owner, "release", in_step=True, failed=self._fail):
            self.drafter.release(request_ids)

    def reset(self) -> None:
        """Pass it on; a drafter that failed may be left with what it has."""
        self.num_drafted = self.num_accepted = 0
        if not self.failure:
            with guarded(self._owner, "reset", in_step=True, failed=self._fail):
                self.drafter.reset()

    def _fail(self, failure: PluginError) -> None:
        """A break of the rules is a failure of the drafter's own, counted once."""
        if self.failure:
            return
        if isinstance(failure, DraftError):
            failure = DraftError(f"drafter {self.name} broke its interface: {told(failure)}")
        if self._on_error == "fail":
            raise failure
        self.failure = failure
        said = f"{failure}. It is switched off; the output is not affected"
        try:
            warnings.warn(said, PluginWarning, stacklevel=2)
        except PluginWarning:  # a filter of the user's makes errors of warnings
            raise
        except Exception:  # a plugin has replaced what shows warnings
            print(f"emssd: warning: {said}", file=sys.stderr)


def own_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int, *, trees: bool = False) -> Draft:
    """A copy of `draft` that keeps the rules, and that nobody else can write to; see `check_draft`.

    Its `extra` is not copied, as it may be large. Writing to it changes the claims of the draft.
    Raises DraftError: it is no `Draft`, or breaks a rule.
    """
    if not isinstance(draft, Draft):
        raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.drafting.Draft")
    if not isinstance(draft.token_ids, torch.Tensor):
        raise DraftError(f"its token_ids are a {type(draft.token_ids).__name__}; give one int64 tensor")
    if draft.token_ids.is_meta:
        raise DraftError("its token_ids are on the device meta, where tensors hold nothing; give ids")
    own = Draft(
        token_ids=draft.token_ids.clone(),
        indptr=tuple(map(index, draft.indptr)),
        parents=None if draft.parents is None else tuple(map(index, draft.parents)),
        confidence=None if draft.confidence is None else tuple(map(float, draft.confidence)),
        extra=None if draft.extra is None else tuple(draft.extra),
    )
    check_draft(own, batch, budget, vocab_size, trees=trees)
    return own


def check_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int, *, trees: bool = False) -> None:
    """Test a draft against the rules of the interface.

    Raises:
        DraftError: token ids that are no flat int64 tensor, wrong number of rows, more than the budget, no tree, a tree
            that is too deep or was not announced, an `extra` that does not fit, or, where they lie on the host, ids
            outside the vocabulary.
    """
    if draft.token_ids.dtype != torch.int64 or draft.token_ids.ndim != 1:
        raise DraftError(
            f"its token_ids are {draft.token_ids.dtype} of {draft.token_ids.ndim} dimensions; "
            f"give one int64 tensor of all rows' tokens"
        )
    if len(draft.indptr) - 1 != len(batch.rows) or draft.indptr[0] != 0 or draft.indptr[-1] != draft.token_ids.numel():
        raise DraftError(
            f"its draft has {draft.num_rows} rows over {draft.token_ids.numel()} tokens (indptr {draft.indptr}), "
            f"but the batch has {len(batch)} rows; return one chain or tree, possibly empty, per row"
        )
    lengths = draft.lengths
    for row, length, limit in zip(batch.rows, lengths, budget, strict=True):
        if not 0 <= length <= limit:
            raise DraftError(
                f"it drafted {length} tokens for request {row.request_id!r} with a budget of {limit}; "
                f"draft at most budget[row] tokens",
                "budget",
            )
    for name, rule, values in (("parents", "tree", draft.parents), ("confidence", "confidence", draft.confidence)):
        if values is not None and len(values) != draft.token_ids.numel():
            count = draft.token_ids.numel()
            raise DraftError(f"its draft has {len(values)} {name} for {count} tokens; give one for each", rule)
    sure = np.array(() if draft.confidence is None else draft.confidence)
    if not ((sure >= 0) & (sure <= 1)).all():
        raise DraftError("its confidence has numbers outside of 0 to 1, or NaN; give probabilities", "confidence")
    _check_trees(draft, lengths, batch, trees)
    if draft.extra is not None and len(draft.extra) != draft.num_rows:
        count = len(draft.extra)
        raise DraftError(f"its draft has extra for {count} rows of {draft.num_rows}; give None where there is none")
    for place, extra in enumerate(draft.extra or ()):
        if extra is not None:
            extra.check(draft.tree(place), vocab_size)
    if draft.on_host:
        check_ids(draft.token_ids.tolist(), vocab_size)


def _check_trees(draft: Draft, lengths: Seq[int], batch: Batch, announced: bool) -> None:
    if draft.parents:
        parents = np.array(draft.parents)
        places = np.arange(len(parents)) - np.repeat(draft.indptr[:-1], lengths)  # each node's index within its row
        is_wrong, is_branch = (parents < -1) | (parents >= places), parents != places - 1
        if is_wrong.any() or (is_branch.any() and not announced):
            node = int((is_wrong if is_wrong.any() else is_branch).argmax())
            name = batch.rows[np.searchsorted(draft.indptr, node, side="right") - 1].request_id
            if is_wrong.any():
                raise DraftError(
                    f"node {places[node]} of its tree for request {name!r} has parent {parents[node]}; a parent is an "
                    f"earlier node of the same row, or -1 for the row's newest token",
                    "tree",
                )
            raise DraftError(
                f"it drafted a token tree for request {name!r}, and its drafts_trees is False; draft a chain, or set "
                f"drafts_trees = True",
                "tree",
            )
    for place, (row, length) in enumerate(zip(batch.rows, lengths, strict=True)):
        num_remaining = row.num_remaining
        if length < num_remaining or not length:
            continue
        depth = length if draft.parents is None else max(depths(draft.tree(place)))
        if depth > max(0, num_remaining - 1):
            raise DraftError(
                f"its tree for request {row.request_id!r} has depth {depth}, and the row may still generate "
                f"{num_remaining} tokens; its depth is at most row.num_remaining - 1 (Draft.shallow cuts it)",
                "depth",
            )


def check_ids(token_ids: Seq[int], vocab_size: int) -> None:
    """Test ids against the vocabulary; those on a device are tested when verification brings them to the host. Raises
    DraftError: an id is outside of it.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise DraftError(
            f"it drafted token id {low if low < 0 else high}, outside the target's vocabulary "
            f"of {vocab_size}; ids must be in 0..{vocab_size - 1}",
            "vocabulary",
        )
