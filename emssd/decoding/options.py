"""Options of an engine: those that the library and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.errors.ranges import AtLeastOne, check_options

__all__ = ["DEFAULT_DRAFTER", "Admission", "Batching", "EngineOptions", "OnDrafterError"]

DEFAULT_DRAFTER = "suffix"  # conf/config.yaml, which cannot take it from here, says the same


class Batching(str, Enum):
    """The time at which a row that has ended is replaced."""

    auto = "auto"
    continuous = "continuous"
    static = "static"


class Admission(str, Enum):
    """The condition on which a waiting row may start beside running ones."""

    preempt = "preempt"
    worst_case = "worst_case"


class OnDrafterError(str, Enum):
    """The consequence of a drafter's failure."""

    disable = "disable"
    fail = "fail"


@dataclass
class EngineOptions:
    """Options of an engine beside its model, drafter, backend and budget policy.

    Attributes:
        batch_size: rows decoded together.
        batching: ``continuous`` replaces a row in the step after it ends; ``static`` refills a batch when all of its
            rows are done, as in the paper; ``auto`` is continuous where the backend can.
        max_step_tokens: tokens that a step may compute before prompts are cut into pieces (continuous only).
        kv_memory: limit of the KV cache, as a size (``8GiB``) or as a share of the free memory (``0.8``). ``null`` is
            no limit on a CPU, and 0.9 on a GPU.
        admission: ``preempt`` starts rows as long as there is room, and lets the latest begin anew where room runs
            out; ``worst_case`` starts a row only if all running ones could grow to their limits.
        prefix_caching: prompts that begin alike share the KV of what they share, in whole pages, so that it is computed
            once; ``false`` computes every prompt on its own. Backends without pages never share.
        on_drafter_error: ``disable`` goes on without a drafter that fails; ``fail`` ends the run.
        force_tokens: draft the tokens to which a grammar leaves no choice, in front of the drafter.
    """

    batch_size: AtLeastOne = 8
    batching: Batching = Batching.auto
    max_step_tokens: AtLeastOne = 512
    kv_memory: str | None = None
    admission: Admission = Admission.preempt
    prefix_caching: bool = True
    on_drafter_error: OnDrafterError = OnDrafterError.disable
    force_tokens: bool = True

    def __post_init__(self) -> None:
        check_options(self)
