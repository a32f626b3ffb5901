"""`drafter=repeat_last`: bets that the newest token comes again."""

from dataclasses import dataclass

from emssd.drafting import Draft, Drafter
from emssd.hooks import DrafterSpec, hookimpl


@dataclass
class RepeatConfig:
    """Options of `drafter=repeat_last`: `length` is how many times the newest token is drafted."""

    length: int = 3


class RepeatDrafter(Drafter):
    """Drafts the newest token of every row, `length` times."""

    def __init__(self, config, context):
        self.num_speculative_tokens = config.length

    def propose(self, batch, budget):
        return Draft.from_chains([row.tokens[-1]] * limit for row, limit in zip(batch, budget, strict=True))


@hookimpl
def emssd_drafters():
    """Offer the drafter."""
    return [DrafterSpec("repeat_last", RepeatConfig, RepeatDrafter)]
