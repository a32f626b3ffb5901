"""The border to a drafter: what it returns is checked, and a fault of its own never costs a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from emssd.drafting.budget import GoesOn
from emssd.drafting.draft import Draft, Outcome, check_ids
from emssd.drafting.drafter import Drafter
from emssd.drafting.hidden import checked_layers
from emssd.errors import ConfigError, DraftError, PluginError, PluginWarning
from emssd.errors.faults import described, guarded
from emssd.sequences import Batch

__all__ = ["CheckedDrafter"]


class CheckedDrafter(Drafter):
    """Calls a drafter, checks its drafts, and switches it off, or raises, when it fails.

    Args:
        name: how messages call the plugin that it comes from.
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
        with guarded(self._owner, "drafts_trees"):
            self.drafts_trees = bool(drafter.drafts_trees)
        try:
            with guarded(self._owner, "hidden_layers"):
                self.hidden_layers = checked_layers(drafter.hidden_layers)
        except DraftError as error:
            raise DraftError(f"{self._owner} broke its interface: {described(error)}") from error
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
        if not self.failure:
            try:
                number = getattr(self.drafter, name)
                if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
                    return number
                raise DraftError(f"its {name} is {number!r}; it must be an integer, at least 0")
            except BaseException as error:
                self._fail(name, error)
        return 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """A draft that keeps the rules of the interface, see `Draft.check`; empty once the drafter has failed.

        Raises:
            DraftError: it broke a rule, with ``on_error="fail"``. PluginError: it raised.
        """
        if batch.rows and not self.failure:
            limits = tuple(budget)
            try:
                draft = self.drafter.propose(batch, limits)
                if not isinstance(draft, Draft):
                    raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.drafting.Draft")
                return draft.check(batch, limits, self._vocab_size, trees=self.drafts_trees)
            except BaseException as error:
                self._fail("propose", error)
        return Draft.empty(len(batch))

    def end_by(self, goes_on: GoesOn | None) -> None:
        """Pass it on."""
        self._call("end_by", goes_on)

    def check_ids(self, drafted: Seq[int]) -> None:
        """Check ids that were drafted on a device, now that they have come to the host; none of these was accepted."""
        try:
            check_ids(drafted, self._vocab_size)
        except DraftError as error:
            self._fail("propose", error)

    def observe(self, outcome: Outcome) -> None:
        """Pass the outcome on, with the hidden states that the drafter wants."""
        if self.failure or not (outcome.batch.rows or (self.hidden_layers and outcome.hidden is not None)):
            return
        self.num_drafted += outcome.draft.indptr[-1]
        self.num_accepted += sum(map(len, outcome.accepted))
        try:
            hidden = outcome.hidden.of(self.hidden_layers) if outcome.hidden and self.hidden_layers else None
            self.drafter.observe(outcome if hidden is outcome.hidden else replace(outcome, hidden=hidden))
        except BaseException as error:
            self._fail("observe", error)

    def release(self, request_ids: Iterable[str]) -> None:
        """Pass it on, also to a drafter that failed, which may still hold something of these requests."""
        self._call("release", request_ids)

    def reset(self) -> None:
        """Pass it on; a drafter that failed may be left with what it has."""
        self.num_drafted = self.num_accepted = 0
        if not self.failure:
            self._call("reset")

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.drafter, method)(*arguments)
        except BaseException as error:
            self._fail(method, error)

    def _fail(self, where: str, error: BaseException) -> None:
        """Raise an error of the drafter's own with its name, or switch the drafter off with a warning, once."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if self.failure:
            return
        if isinstance(error, DraftError):
            failure: PluginError = DraftError(f"{self._owner} broke its interface: {described(error)}", error.rule)
        else:
            failure = PluginError(f"{self._owner} failed in {where}: {described(error)}")
        failure.__cause__ = error
        if self._on_error == "fail":
            raise failure
        self.failure = failure
        warnings.warn(f"{failure}. It is switched off; the output is not affected", PluginWarning, stacklevel=2)
