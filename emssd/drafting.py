"""A drafter held to its interface: what it returns is checked, and a fault of its own never costs a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.draft import Draft, Drafter, Outcome, check_draft, check_ids
from emssd.errors import ConfigError, DraftError, PluginError, PluginWarning
from emssd.sequence import Batch

__all__ = ["CheckedDrafter"]


class CheckedDrafter(Drafter):
    """Calls a drafter, checks its drafts, and switches it off, or raises, when it fails.

    Args:
        drafter: what to call.
        name: how messages call the plugin it comes from.
        vocab_size: of the target.
        on_error: ``"disable"`` warns and drafts nothing from then on; ``"fail"`` raises.
    """

    def __init__(self, drafter: Drafter, name: str | None, vocab_size: int, *, on_error: str = "disable") -> None:
        if on_error not in ("disable", "fail"):
            raise ConfigError(f"on_drafter_error is {on_error!r}; choose disable or fail")
        self.drafter = drafter
        self.name = type(drafter).__name__ if name is None else f"{name}"
        self.failure: PluginError | None = None
        self._vocab_size = vocab_size
        self._on_error = on_error

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # read-only: the drafter's own, 0 if it failed
        """The most tokens it proposes for one row in one step."""
        return 0 if self.failure else self.drafter.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """A draft that keeps the rules of the interface; empty once the drafter has failed.

        Raises:
            DraftError: it changed the batch; or, with ``on_error="fail"``, it broke another rule.
            PluginError: it raised, with ``on_error="fail"``.
        """
        if self.failure or not batch:
            return Draft.empty(len(batch))
        before = [len(row.tokens) for row in batch]
        try:
            draft = self.drafter.propose(batch, budget)
            if not isinstance(draft, Draft):
                raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.draft.Draft")
            check_draft(draft, batch, budget, self._vocab_size)
        except Exception as error:
            self._fail("propose", error)
            draft = Draft.empty(len(batch))
        if before != [len(row.tokens) for row in batch]:  # there is no way back to what the tokens were
            raise DraftError(
                f"drafter {self.name} broke its interface: it changed the tokens of the batch, which it may only read"
            )
        return draft

    def check_ids(self, drafted: Seq[int]) -> None:
        """Check ids that were drafted on a device, now that they have come to the host; none of these was accepted."""
        try:
            check_ids(drafted, self._vocab_size)
        except DraftError as error:
            self._fail("propose", error)

    def observe(self, outcome: Outcome) -> None:
        """Pass on what became of a draft."""
        if outcome.batch and not self.failure:
            try:
                self.drafter.observe(outcome)
            except Exception as error:
                self._fail("observe", error)

    def release(self, request_ids: Iterable[str]) -> None:
        """Pass on which requests to forget; also to a drafter that failed, which may still hold something of theirs."""
        try:
            self.drafter.release(request_ids)
        except Exception as error:
            if not self.failure:
                self._fail("release", error)

    def forget(self) -> None:
        """Pass it on; a drafter that failed may be left with what it has."""
        if not self.failure:
            try:
                self.drafter.forget()
            except Exception as error:
                self._fail("forget", error)

    def _fail(self, where: str, error: Exception) -> None:
        if isinstance(error, DraftError):
            failure: PluginError = DraftError(f"drafter {self.name} broke its interface: {error}")
        else:
            failure = PluginError(f"drafter {self.name} failed in {where}: {error!r}")
        if self._on_error == "fail":
            raise failure from error
        self.failure = failure
        warnings.warn(f"{failure}. It is switched off; the output is not affected", PluginWarning, stacklevel=2)
