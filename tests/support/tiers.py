"""Lists of cases: which of them CI tests and which the nightly tests add, and which are one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])


def few(cases: Iterable[Any], *, ci: int) -> list[Any]:
    """`cases` for ``pytest.mark.parametrize``: the first `ci` as they are, those after them marked ``nightly``."""
    return [case if i < ci else _nightly(case) for i, case in enumerate(cases)]


def only(cases: Iterable[Any], *, ci: Iterable[Any]) -> list[Any]:
    """`cases` for ``pytest.mark.parametrize``: those that are in `ci` as they are, the others marked ``nightly``."""
    chosen = list(ci)
    return [case if case in chosen else _nightly(case) for case in cases]


def _nightly(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.nightly])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)


def looped(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, but all cases are one test, which names the case that failed.

    For many quick cases of one formula: they would only lengthen the list of tests. Fixtures are shared by the cases.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    all_values = [_values(case, len(names)) for case in cases]

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(*arguments: Any, **fixtures: Any) -> None:
            skipped = []
            for values in all_values:
                chosen = dict(zip(names, values, strict=True))
                try:
                    test(*arguments, **fixtures, **chosen)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except BaseException as error:
                    error.add_note(f"the case was {chosen}")
                    raise
            if len(skipped) == len(all_values):
                raise skipped[0]

        shown = signature(test)
        others = [parameter for name, parameter in shown.parameters.items() if name not in names]
        run.__signature__ = shown.replace(parameters=others)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def _values(case: Any, number: int) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "a case of a loop cannot be marked"
        return tuple(case.values)
    return (case,) if number == 1 else tuple(case)
