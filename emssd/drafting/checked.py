"""A drafter held to its interface: what it returns is checked, and a fault of its own never costs a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace

from emssd.drafting.budget import GoesOn
from emssd.drafting.draft import Draft, Outcome
from emssd.drafting.drafter import Drafter
from emssd.drafting.hidden import checked_layers
from emssd.drafting.rules import check_ids, own_draft
from emssd.errors import ConfigError, DraftError, PluginError, PluginWarning
from emssd.faults import guarded, told
from emssd.sequences import Batch

__all__ = ["CheckedDrafter"]


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
        PluginError: it fails while it says these. DraftError: its `hidden_layers` cannot be.
    """

    def __init__(self, drafter: Drafter, name: str | None, vocab_size: int, *, on_error: str = "disable") -> None:
        if on_error not in ("disable", "fail"):
            raise ConfigError(f"on_drafter_error is {on_error!r}; choose disable or fail")
        self.drafter = drafter
        self.name = type(drafter).__name__ if name is None else f"{name}"
        with guarded(f"drafter {self.name}", "drafts_trees"):
            self.drafts_trees = bool(drafter.drafts_trees)
        try:
            with guarded(f"drafter {self.name}", "hidden_layers"):
                self.hidden_layers = checked_layers(drafter.hidden_layers)
        except DraftError as error:
            raise DraftError(f"drafter {self.name} broke its interface: {told(error)}") from error
        self.failure: PluginError | None = None
        self._vocab_size = vocab_size
        self._on_error = on_error

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # read-only: the drafter's own, 0 if it failed
        """The most tokens it proposes for one row in one step."""
        if not self.failure:
            with self._guarded("num_speculative_tokens"):
                return _checked_count("num_speculative_tokens", self.drafter.num_speculative_tokens)
        return 0

    @property
    def num_candidates(self) -> int:  # type: ignore[override]  # read-only: the drafter's own, 0 if it failed
        """How many of the target's best tokens it wants to hear of."""
        if not self.failure:
            with self._guarded("num_candidates"):
                return _checked_count("num_candidates", self.drafter.num_candidates)
        return 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """A draft that keeps the rules of the interface; empty once the drafter has failed.

        It is a copy: whatever the drafter does to its own later, what is packed is what is verified.

        Raises:
            DraftError: it changed the batch; or, with ``on_error="fail"``, it broke another rule.
            PluginError: it raised, with ``on_error="fail"``.
        """
        if self.failure or not batch:
            return Draft.empty(len(batch))
        limits = tuple(budget)
        with self._batch_kept(batch), self._guarded("propose"):
            draft = self.drafter.propose(batch, limits)
            return own_draft(draft, batch, limits, self._vocab_size, trees=self.drafts_trees)
        return Draft.empty(len(batch))

    def end_by(self, goes_on: GoesOn | None) -> None:
        """Pass it on."""
        with self._guarded("end_by"):
            self.drafter.end_by(goes_on)

    def check_ids(self, drafted: Seq[int]) -> None:
        """Check ids that were drafted on a device, now that they have come to the host; none of these was accepted."""
        try:
            check_ids(drafted, self._vocab_size)
        except DraftError as error:
            self._fail(error)

    def observe(self, outcome: Outcome) -> None:
        """Pass on what became of a draft, with the hidden states that the drafter wants."""
        if self.failure or not (outcome.batch or (self.hidden_layers and outcome.hidden is not None)):
            return
        with self._batch_kept(outcome.batch), self._guarded("observe"):
            hidden = outcome.hidden.of(self.hidden_layers) if outcome.hidden and self.hidden_layers else None
            self.drafter.observe(outcome if hidden is outcome.hidden else replace(outcome, hidden=hidden))

    def release(self, request_ids: Iterable[str]) -> None:
        """Pass it on, also to a drafter that failed, which may still hold something of these requests."""
        with self._guarded("release"):
            self.drafter.release(request_ids)

    def reset(self) -> None:
        """Pass it on; a drafter that failed may be left with what it has."""
        if not self.failure:
            with self._guarded("reset"):
                self.drafter.reset()

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """For a call of the drafter: whatever it does against the rules is a failure of its own, counted once."""
        try:
            with guarded(f"drafter {self.name}", where, in_step=True):
                yield
        except PluginError as error:
            if not self.failure:
                self._fail(error)

    @contextmanager
    def _batch_kept(self, batch: Batch) -> Iterator[None]:
        """For a call that could change `batch`, if only on purpose: there would be no way back to what it was."""
        before = [(len(row.tokens), row.num_cached) for row in batch]
        try:
            yield
        finally:
            if before != [(len(row.tokens), row.num_cached) for row in batch]:
                raise DraftError(
                    f"drafter {self.name} broke its interface: it changed the batch, which it may only read"
                )

    def _fail(self, failure: PluginError) -> None:
        if isinstance(failure, DraftError):
            failure = DraftError(f"drafter {self.name} broke its interface: {told(failure)}")
        if self._on_error == "fail":
            raise failure
        self.failure = failure
        warnings.warn(f"{failure}. It is switched off; the output is not affected", PluginWarning, stacklevel=2)


def _checked_count(name: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise DraftError(f"its {name} is {number!r}; it must be an integer, at least 0")
    return number
