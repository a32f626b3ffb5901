"""`residual` sampling: trees are drawn from a draft's distributions, and verified so that the target's law is kept.

A step emits the tokens of the accepted nodes and one token more. Continued by the target, that text has the law of the
target's own, whatever the draft's distributions ``q`` are, on two conditions:

- Each child is drawn from what its earlier siblings left of the ``q`` behind their parent. (If children are drawn with
  replacement, that is kept too: a child whose token an earlier sibling has is passed over.)
- Whoever decides which node has a further child, or that the draft ends, has seen only what was drawn before. A token
  that was drawn may not be dropped because of what it is, nor because of what was drawn after it: with p = (.9, .1) and
  q = (.5, .5), token 0 comes out with .95 if token 1 is dropped.

A tree that does not meet them, or that has no ``q``, is verified by `verify_deterministic`, which asks for neither.

All functions are pure: randomness is an argument. They use only what tensors have in common with NumPy's arrays of
fractions, so the tests run this same code on rational numbers, and prove its law exactly.
"""

from emssd.sampling.residual.drafts import Beam, SampledTree, extend_beam
from emssd.sampling.residual.rules import Verdict, verify_deterministic, verify_traversal

__all__ = [
    "Beam",
    "SampledTree",
    "Verdict",
    "extend_beam",
    "verify_deterministic",
    "verify_traversal",
]
