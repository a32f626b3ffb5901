"""The rules that the conformance suites hold plugins to, and the error that names the one which was broken.

Imports nothing heavy: the pytest plugin and the command line read it to tell what was tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from emssd.errors import DraftError
from emssd.errors.faults import described
from emssd_testing.conformance.process import process_kept

__all__ = ["RULES", "BrokenRule", "broken", "broken_rule", "named", "renamed", "rules_of"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One demand of an interface, in a sentence. Its name is stable, ``KIND.WORD``."""

    name: str
    demand: str

    @property
    def kind(self) -> str:
        """``drafter``, ``backend`` or ``budget``."""
        return self.name.partition(".")[0]

    @property
    def page(self) -> str:
        """The page that explains the rule."""
        return f"docs/reference/{self.kind}_rules.md#{self.name.replace('.', '-').replace('_', '-')}"


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("drafter.build", "each build gives a new drafter, or a list of new ones, that says how much it drafts"),
        Rule("drafter.pickle", "its options survive pickle, copy and deepcopy"),
        Rule("drafter.options", "its options survive the command line: Hydra's structured config and its YAML"),
        Rule("drafter.draft", "propose returns a Draft: flat int64 ids, one chain or tree for each row of the batch"),
        Rule("drafter.budget", "it drafts at most budget[row] tokens for a row"),
        Rule("drafter.tree", "a parent is an earlier node of its row, or -1; a drafter of trees says drafts_trees"),
        Rule("drafter.depth", "no path through a tree is longer than the row may go on, less one"),
        Rule("drafter.confidence", "its confidence, if it has any, is a number from 0 to 1 for each token"),
        Rule("drafter.vocabulary", "drafted ids are in 0..vocab_size - 1"),
        Rule("drafter.batch", "it reads the batch and outcomes, and changes nothing of them"),
        Rule("drafter.accounting", "what it drafted is what the engine verifies, counts and reports back"),
        Rule("drafter.zero_budget", "a budget of 0 is a call like any other"),
        Rule("drafter.limits", "one-token prompts, rows with one token left and drafts with an EOS inside are served"),
        Rule("drafter.deterministic", "asked the same again, it drafts the same, unless it says that it draws"),
        Rule("drafter.isolation", "a request gets the same drafts whatever else runs before or beside it"),
        Rule("drafter.release", "a released request is forgotten; unknown ids are no error"),
        Rule("drafter.preemption", "a request that comes again after its release begins anew"),
        Rule("drafter.process", "it leaves no setting of the process changed: PyTorch's, warnings, the environment"),
        Rule("drafter.raises", "no legal call raises"),
        Rule("drafter.lossless", "the tokens are those of plain greedy decoding"),
        Rule("backend.build", "each build gives a new backend"),
        Rule("backend.pickle", "its options survive pickle, copy and deepcopy"),
        Rule("backend.options", "its options survive the command line: Hydra's structured config and its YAML"),
        Rule("backend.unsupported", "unsupported answers with a list of reasons, the same before and after allocate"),
        Rule("backend.plan", "a plan feeds the model every token at its position, and points at the wanted logits"),
        Rule("backend.output", "forward returns finite values of shape [b * n, num_qo_heads, value_dim]"),
        Rule("backend.attention", "attention equals the dense reference after any history"),
        Rule("backend.isolation", "what a query does not see changes nothing of its result, even if it is NaN"),
        Rule("backend.retry", "a step that was planned and not committed never happened"),
        Rule("backend.batch_invariant", "if it says so, a token's bits are those of its row alone, without drafts"),
        Rule("backend.commit", "commit returns how many slots were lost to padding, 0 or more"),
        Rule("backend.memory", "kv_usage covers what sequences hold, nothing is held for nobody, peaks never fall"),
        Rule("backend.release", "released sequences hold nothing; unknown ids are no error"),
        Rule("backend.fits", "what fits says is true: such steps run, and within the limit of memory"),
        Rule("backend.process", "it leaves no setting of the process changed: PyTorch's, warnings, the environment"),
        Rule("backend.raises", "no legal call raises"),
        Rule("backend.lossless", "the tokens are those of plain greedy decoding"),
        Rule("budget.build", "each build gives a new BudgetPolicy"),
        Rule("budget.pickle", "its options survive pickle, copy and deepcopy"),
        Rule("budget.options", "its options survive the command line: Hydra's structured config and its YAML"),
        Rule("budget.allot", "allot gives one whole number for each row, from 0 to its limit"),
        Rule("budget.trim", "trim gives one whole number for each row, from 0 to the length of its draft"),
        Rule("budget.goes_on", "goes_on gives one answer for each row"),
        Rule("budget.batch", "it reads the batch, drafts and outcomes, and changes nothing of them"),
        Rule("budget.limits", "steps without rows or drafts, limits of 0 and later drafters are met like any other"),
        Rule("budget.trees", "token trees are met like chains, with confidence and without"),
        Rule("budget.deterministic", "told the same again, it decides the same, unless it says that it draws"),
        Rule("budget.release", "a released request is forgotten; unknown ids are no error"),
        Rule("budget.preemption", "a request that comes again after its release is met as a new one"),
        Rule("budget.process", "it leaves no setting of the process changed: PyTorch's, warnings, the environment"),
        Rule("budget.raises", "no legal call raises"),
        Rule("budget.lossless", "the tokens are those of plain greedy decoding"),
    )
}
"""Every rule by its name, in the order in which reports show them."""


class BrokenRule(AssertionError):  # noqa: N818  # it says what happened
    """A plugin broke a `rule` of its interface."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}\n  The rule: {RULES[rule].demand}.\n  See {RULES[rule].page}")
        self.rule = rule
        self.message = message


def broken(rule: str, message: str) -> NoReturn:
    """Raise `BrokenRule`; `message` says what the plugin did, and how to mend it."""
    raise BrokenRule(rule, message)


def rules_of(kind: str) -> list[Rule]:
    """The rules of a kind of plugin."""
    return [rule for rule in RULES.values() if rule.kind == kind]


def broken_rule(error: BaseException | None) -> BrokenRule | None:
    """The broken rule in `error`, in its causes, or, where Hypothesis met several, in one of its parts."""
    seen: set[int] = set()  # causes may go round: OmegaConf's do wherever code is traced
    while error is not None and id(error) not in seen:
        if isinstance(error, BrokenRule):
            return error
        if isinstance(error, BaseExceptionGroup):
            return next((rule for part in error.exceptions if (rule := broken_rule(part))), None)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def named(rule: str, what: str) -> Iterator[None]:
    """An exception of the body breaks `rule`, unless it is a `BrokenRule` or a `DraftError`. `what` names the call.

    What the body leaves changed for the whole process is set back, and breaks ``KIND.process``.
    """
    try:
        with process_kept() as changed:
            yield
    except BaseException as error:  # a plugin may exit, too
        origin = type(error).__module__.partition(".")[0]
        if isinstance(error, KeyboardInterrupt) or origin in ("hypothesis", "_pytest"):
            raise
        if (inner := broken_rule(error)) is not None:
            raise inner from None
        if isinstance(error, DraftError):
            broken(f"drafter.{error.rule}", str(error))
        broken(rule, f"{what} raised {described(error)}")
    if changed:
        kind = rule.partition(".")[0]
        broken(f"{kind}.process", f"{what} left {' and '.join(changed)} changed for the whole process; set that back")


@contextmanager
def renamed(rule: str, unless: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A call that raises breaks `rule` instead of ``KIND.raises``, unless `unless` raises too: then that is why."""
    try:
        yield
    except BrokenRule as error:
        if error.rule != f"{RULES[rule].kind}.raises":
            raise
        unless()
        raise BrokenRule(rule, error.message) from error.__cause__
