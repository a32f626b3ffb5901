"""Lists of cases: the share of CI and of the nightly tests, and cases that are one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any

import pytest


def few(cases: Iterable[Any], *, ci: int) -> list[Any]:
    """`cases` for ``pytest.mark.parametrize``: the first `ci` as they are, those after them marked ``nightly``."""
    return [case if i < ci else _nightly(case) for i, case in enumerate(cases)]


def only(cases: Iterable[Any], *, ci: Iterable[Any]) -> list[Any]:
    """`cases` for ``pytest.mark.parametrize``: those in `ci` as they are, the rest marked ``nightly``."""
    chosen = list(ci)
    return [case if case in chosen else _nightly(case) for case in cases]


def _nightly(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.nightly])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)


def looped(
    names: str | Sequence[str], cases: Iterable[Any], *, at_a_time: int | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Parametrize as pytest does, but in one test, which names the case that failed.

    For many quick cases of one formula: they would only lengthen the list of tests. Fixtures are shared by the cases.

    Args:
        names: of the parameters.
        cases: values for each.
        at_a_time: makes several tests, of so many cases each, where all of them would take too long.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    all_cases = [dict(zip(names, _values(case, len(names)), strict=True)) for case in cases]
    assert all_cases, "there are no cases"

    def decorate(test: Callable[..., None]) -> Any:
        def run(*arguments: Any, chosen: list[dict[str, Any]] = all_cases, **fixtures: Any) -> None:
            skipped = []
            for case in chosen:
                try:
                    test(*arguments, **fixtures, **case)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except BaseException as error:
                    error.add_note(f"the case was {str(case)[:500]}")
                    raise
            if len(skipped) == len(chosen):
                raise skipped[0]

        decorated: Any = update_wrapper(run, test)
        del decorated.__wrapped__  # pytest would take its parameters for fixtures
        others = [parameter for name, parameter in signature(test).parameters.items() if name not in names]
        if at_a_time is not None:
            others.append(Parameter("chosen", Parameter.KEYWORD_ONLY))
        decorated.__signature__ = Signature(others)
        if at_a_time is None:
            return decorated
        starts = range(0, len(all_cases), at_a_time)
        groups = [all_cases[start : start + at_a_time] for start in starts]
        return pytest.mark.parametrize("chosen", groups, ids=[f"from {start + 1}" for start in starts])(decorated)

    return decorate


def _values(case: Any, number: int) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "a case of a loop cannot be marked"
        return tuple(case.values)
    return (case,) if number == 1 else tuple(case)
