"""Which cases of a long list CI tests, and which the nightly tests add."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
