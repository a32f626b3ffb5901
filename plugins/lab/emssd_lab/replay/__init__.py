"""Plugin `drafter=replay`: drafts that are right as often as stated, for studies of hardware."""

from __future__ import annotations

from dataclasses import dataclass, field

from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne, AtLeastZero, Positive, Share
from emssd.hooks import DrafterSpec, offering

__all__ = ["ReplayConfig"]


@dataclass
class ReplayConfig:
    """Options of `drafter=replay`. Not a way to decode faster: it has to know the output beforehand.

    Verification is the real one. The drafter knows what the target will generate, and spoils it on purpose, so that as
    much is accepted as the chances say. Every output that shows its figures calls them replay.

    Attributes:
        p: probability that a drafted token is right, given that those before it are (the paper's p, Equation 6).
        concentration: gives each request a p of its own, from a Beta distribution of mean `p` whose parameters have
            this sum; ``null`` gives all the same.
        coverage: share of positions at which there is a draft at all, as retrieval does not always find one.
        num_speculative_tokens: drafted per row and step, in a chain.
        branches: children of each node by level, as in ``[3,2,1]``: drafts are token trees of that shape, best nodes
            first, in the place of chains.
        chances: by depth a list of how likely each child is the right one, by its rank, in the place of `p`. The last
            holds for deeper levels. ``[]`` is ``[[p]]``.
        known: ``generations.jsonl`` of an earlier run of the same prompts: what the target will generate. ``null``
            serves models of ``model.architecture``, whose text is known without; and with ``p=0`` any model, whose
            drafts then are arbitrary tokens and right by chance at most.
    """

    p: Share = 0.75
    concentration: Positive | None = None
    coverage: Share = 1.0
    num_speculative_tokens: AtLeastZero = 7
    branches: list[AtLeastOne] = field(default_factory=list)
    chances: list[list[Share]] = field(default_factory=list)
    known: str | None = None


def _build(config: ReplayConfig, context: DrafterContext) -> Drafter:
    from emssd_lab.replay.drafter import UNKNOWN, ReplayDrafter

    drafter = ReplayDrafter(config, context.vocab_size)
    if drafter.must_count and context.tokenizer is not None:  # models of model.architecture have none
        raise ConfigError(UNKNOWN)
    return drafter


emssd_drafters = offering(DrafterSpec("replay", ReplayConfig, _build))
