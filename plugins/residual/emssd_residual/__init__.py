"""Plugin `sampling.method=residual`: drafts are held against the distributions that they were drawn from.

A step emits the tokens of the accepted nodes and one token more. Continued by the target, that text has the law of the
target's own, whatever the draft's distributions ``q`` are, on two conditions:

- Each child is drawn from what its earlier siblings left of the ``q`` behind their parent. (If children are drawn with
  replacement, that is kept too: a child whose token an earlier sibling has is passed over.)
- Whoever decides which node has a further child, or that the draft ends, has seen only what was drawn before. A token
  that was drawn may not be dropped because of what it is, nor because of what was drawn after it: with p = (.9, .1) and
  q = (.5, .5), token 0 comes out with .95 if token 1 is dropped.

A tree that does not meet them, or that has no ``q``, is verified by `verify_deterministic`, which asks for neither.

A drafter draws trees as `SampledDrafter` does, and gives them a `Drawn` as `Draft.extra`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emssd.plugins import RuleSpec, hookimpl

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
