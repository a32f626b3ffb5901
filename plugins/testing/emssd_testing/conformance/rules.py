"""The rules that the conformance suites hold plugins to, and the error that names the one which was broken.

Imports nothing heavy: the pytest plugin and the command line read it to tell what was tested.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


RULES = {
    f"{kind}.{word}": Rule(f"{kind}.{word}", demand)
    for kind, demands in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for word, demand in demands.items()
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
