"""Drafter `noting`, of a plugin that is not emssd's: it counts on, and notes all that it is asked and told."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.hooks import DrafterSpec, offering
from emssd.sequences import Batch

CYCLE = 7  # it drafts the numbers below this in turn
NOTED: list[tuple[str, Any]] = []
POINT = EntryPoint("noting", "tests.support.noting_plugin", "emssd")


@dataclass
class NotingConfig:
    """Options of `drafter=noting`."""

    longest: int = 4
    needs: str = ""


class NotingDrafter(Drafter):
    """Drafts ``n + 1, n + 2, …`` after ``n``."""

    def __init__(self, config: NotingConfig) -> None:
        self.num_speculative_tokens = config.longest
        self.drafts_trees = config.needs == "trees"
        self.num_candidates = 2 if config.needs == "candidates" else 0
        self.hidden_layers = (1,) if config.needs == "hidden" else ()

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        NOTED.append(("propose", {row.request_id: (row.request.prompt_ids, tuple(row.tokens)) for row in batch}))
        ranges = (
            range(row.tokens[-1] + 1, row.tokens[-1] + 1 + limit) for row, limit in zip(batch, budget, strict=True)
        )
        return Draft.from_chains([token % CYCLE for token in numbers] for numbers in ranges)

    def observe(self, outcome: Outcome) -> None:
        chains = [
            outcome.draft.token_ids[a:b].tolist()
            for a, b in zip(outcome.draft.indptr, outcome.draft.indptr[1:], strict=False)
        ]
        rows = zip(outcome.batch, chains, outcome.accepted, outcome.target_ids, strict=True)
        outcomes = {
            row.request_id: (tuple(row.tokens), chain, list(nodes), list(ids), row.finish_reason)
            for row, chain, nodes, ids in rows
        }
        NOTED.append(("observe", outcomes))

    def release(self, request_ids: Iterable[str]) -> None:
        NOTED.append(("release", list(request_ids)))


def _build(config: NotingConfig, context: DrafterContext) -> Drafter:
    if config.needs == "model":
        context.load_runner("small")
    return NotingDrafter(config)


emssd_drafters = offering(DrafterSpec("noting", NotingConfig, _build))
