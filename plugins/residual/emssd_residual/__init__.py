"""Plugin `sampling.method=residual`: drafts are held against the distributions that they were drawn from.

The text has the law of the target alone, whatever the draft's distributions ``q`` are, on two conditions. Each child is
drawn from the rest that its earlier siblings left of their parent's ``q``. Nobody drops a token because of its id, or
of tokens drawn after it (docs/decisions/0024-residual-sampling.md). A drafter draws trees as `SampledDrafter` does, and
gives them a `Drawn` as `Draft.extra`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emssd.hooks import RuleSpec, offering

if TYPE_CHECKING:
    from emssd.drafting.rule import VerificationRule

__all__ = ["emssd_verification_rules"]


@dataclass
class ResidualConfig:
    """`sampling.method=residual` has no options."""


def _build(config: ResidualConfig) -> VerificationRule:
    from emssd_residual.rules import ResidualRule

    return ResidualRule()


emssd_verification_rules = offering(RuleSpec("residual", ResidualConfig, _build))
