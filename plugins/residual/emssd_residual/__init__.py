"""Plugin `sampling.method=residual`: drafts are held against the distributions that they were drawn from.

The text has the law of the target's own, whatever the draft's distributions ``q`` are, if each child is drawn from what
its earlier siblings left of the ``q`` behind their parent, and if nobody drops a token for what it is, or for what was
drawn after it (docs/decisions/0024-residual-sampling.md). A drafter draws trees as `SampledDrafter` does, and gives
them a `Drawn` as `Draft.extra`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emssd.hooks import RuleSpec, hookimpl

if TYPE_CHECKING:
    from emssd.drafting.rule import VerificationRule

__all__ = ["emssd_verification_rules"]


@dataclass
class ResidualConfig:
    """`sampling.method=residual` has no options."""


def _build(config: ResidualConfig) -> VerificationRule:
    from emssd_residual.rule import ResidualRule

    return ResidualRule()


@hookimpl
def emssd_verification_rules() -> list[RuleSpec]:
    """Offer the rule."""
    return [RuleSpec("residual", ResidualConfig, _build)]
