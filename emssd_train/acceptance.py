"""Measures a drafter: decodes held-out prompts with it, and counts the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.model import TargetModel
from emssd_train.options import TrainOptions
from emssd_train.texts import requests

__all__ = ["Acceptance", "measure"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The acceptance of the drafts of a run; they are chains.

    Attributes:
        drafted: ``[depth]`` drafts that were so long at least.
        accepted: ``[depth]`` drafts of which so many tokens were accepted at least.
        tau: mean acceptance length τ, tokens for each row and step, the target's own token included.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tau: float

    @property
    def shares(self) -> list[float]:
        """``[depth]`` of the drafts that reach a depth, those that were accepted down to it."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    def table(self) -> Table:
        """For the console."""
        table = Table("depth", "drafted", "accepted", "share", title=f"held-out prompts: τ {self.tau:.2f}")
        for depth, share in enumerate(self.shares, start=1):
            table.add_row(str(depth), str(self.drafted[depth - 1]), str(self.accepted[depth - 1]), f"{share:.1%}")
        return table


def measure(
    prompts: Seq[Seq[int]],
    drafter: Any,
    options: TrainOptions,
    target: TargetModel,
    tokenizer: Any,
    tell: Callable[[int], None] = lambda done: None,
) -> Acceptance:
    """Decode `prompts` with a trained drafter, which drafts chains of the trained depth in each step.

    Args:
        prompts: token ids.
        drafter: options of a plugin.
        options: of the training.
        target, tokenizer: that decode.
        tell: is told how many prompts are done.
    """
    engine = Engine.assemble(
        target,
        tokenizer,
        drafter=drafter,
        backend="ragged",
        budget="fixed",
        options=EngineOptions(batch_size=options.batch_size, on_drafter_error=OnDrafterError.fail),
    )
    for done, _ in enumerate(engine.run(requests(enumerate(prompts), options, target, tokenizer)), start=1):
        tell(done)
    report = engine.report
    drafted = tuple(count for _, count in sorted(report.drafted_by_depth.items()))
    accepted = tuple(report.accepted_by_depth.get(depth, 0) for depth in range(1, len(drafted) + 1))
    return Acceptance(drafted, accepted, report.mean_acceptance_length)
