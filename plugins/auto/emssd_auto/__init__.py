"""Plugin `drafter=auto`: retrieval, and the target's rounded weights where model, machine and batch make these pay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.hooks import DrafterSpec, offering
from emssd.sequences import Batch

__all__ = ["AutoConfig", "emssd_drafters", "why_not_self"]

_LEAST_BYTES = 1 << 28  # of weights; fewer may stay in the caches of a processor
_MOST_ROWS = 4
_PATIENCE = 64  # steps of few rows that make up for the time in which weights are rounded


@dataclass
class AutoConfig:
    """`drafter=auto` has no options.

    `suffix` drafts first. In steps of up to 4 rows, `self` drafts where that finds nothing, if the target is on a CPU,
    compiled, and has 256 MiB or more. `budget=adaptive` measures both in the first steps, stops what does not pay, and
    tries it again ever less often. The weights of `self` are rounded in the first step of so few rows, or after
    64 of them if more rows came first.
    """


class FewRows(Drafter):
    """Drafts in steps of few rows with `self`, which it makes by `make` when it is worth the time."""

    label, depth = "self", 4

    def __init__(self, make: Callable[[], Drafter]) -> None:
        self._make, self._wait = make, 0  # steps of few rows before it drafts
        self._drafter: Drafter | None = None

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # none while it waits
        """The most tokens of a draft in the next step."""
        return 0 if self._wait else self.depth

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if len(batch) <= _MOST_ROWS and self._drafter is not None:
            return self._drafter.propose(batch, budget)
        if len(batch) <= _MOST_ROWS:  # in a step without a draft, whose time tells nothing of drafts
            self._drafter = self._make()
        return Draft.empty(len(batch))

    def observe(self, outcome: Outcome) -> None:
        """Wait from a step of many rows on; also while nothing is asked for."""
        if len(outcome.batch) > _MOST_ROWS:
            self._wait = _PATIENCE if self._drafter is None else 1
        else:
            self._wait = max(self._wait - 1, 0)


def why_not_self(context: DrafterContext) -> str | None:
    """The reason why the target's rounded weights would not draft faster than it decodes; ``None`` if they may."""
    target = context.target
    if target is None or target.device.type != "cpu":
        return "the model is not on a CPU, whole"
    if not target.has_program:
        return "the model is not compiled"
    memory = [tensor.untyped_storage() for tensor in (*target.model.parameters(), *target.model.buffers())]
    num_bytes = sum({one.data_ptr(): one.nbytes() for one in memory}.values())
    return f"the model has {num_bytes >> 20} MiB" if num_bytes < _LEAST_BYTES else None


def _build(config: AutoConfig, context: DrafterContext) -> list[Drafter]:
    why = why_not_self(context)
    few = [] if why else [FewRows(lambda: context.make_drafter("self", {"depth": FewRows.depth}))]
    then = f"alone, as {why}" if why else f"and self, the latter in steps of up to {_MOST_ROWS} rows"
    logging.getLogger("emssd").info("drafter=auto: suffix %s", then)
    return [context.make_drafter("suffix", {}), *few]


emssd_drafters = offering(DrafterSpec("auto", AutoConfig, _build))
