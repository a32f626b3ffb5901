"""Many cases of one pattern as one test, so that the list of tests can be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import pytest

_GROUP = "cases"


def looped(names: str, cases: Iterable[Any], *, at_a_time: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """Like ``pytest.mark.parametrize(names, cases)``, but one test runs all cases, with the same fixtures.

    It stops at the first case that fails, and names it.

    Args:
        names: of the parameters, with commas between them.
        cases: values for each.
        at_a_time: makes several tests, of so many cases each, where all of them would take too long.
    """
    parameters = [name.strip() for name in names.split(",")]
    given = [dict(zip(parameters, case if len(parameters) > 1 else (case,), strict=True)) for case in cases]
    assert given, "there are no cases"
    size = at_a_time or len(given)
    groups = [given[start : start + size] for start in range(0, len(given), size)]

    def decorate(test: Callable[..., None]) -> Any:
        def run(*, cases: list[dict[str, Any]], **fixtures: Any) -> None:
            for case in cases:
                try:
                    test(**fixtures, **case)
                except BaseException as error:
                    error.add_note(f"in the case {str(case)[:500]}")
                    raise

        def run_all(**fixtures: Any) -> None:
            run(cases=given, **fixtures)

        decorated: Any = update_wrapper(run_all if len(groups) == 1 else run, test)
        del decorated.__wrapped__  # pytest would take its parameters for fixtures
        wanted = [name for name in inspect.signature(test).parameters if name not in parameters]
        wanted += [_GROUP] * (len(groups) > 1)
        decorated.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wanted]
        )
        if len(groups) == 1:
            return decorated
        first = [str(sum(map(len, groups[:number])) + 1) for number in range(len(groups))]
        return pytest.mark.parametrize(_GROUP, groups, ids=[f"from {number}" for number in first])(decorated)

    return decorate
