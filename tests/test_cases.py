"""Cases that run in one test: each runs, the first that fails is named, and long lists are cut into several tests."""

from __future__ import annotations

import inspect

import pytest

from tests.support.cases import looped


def test_each_case_runs_and_the_first_that_fails_is_named() -> None:
    seen: list[tuple[int, str, str]] = []

    @looped("number, word", [(1, "one"), (2, "two"), (3, "three")])
    def test(number: int, work: str, word: str) -> None:
        seen.append((number, word, work))
        assert number < 2

    assert list(inspect.signature(test).parameters) == ["work"]
    with pytest.raises(AssertionError) as caught:
        test(work="folder")
    assert seen == [(1, "one", "folder"), (2, "two", "folder")]
    assert caught.value.__notes__ == ["in the case {'number': 2, 'word': 'two'}"]


def test_long_lists_are_several_tests() -> None:
    seen: list[int] = []

    @looped("number", range(5), at_a_time=2)
    def test(number: int) -> None:
        seen.append(number)

    (mark,) = test.pytestmark
    assert mark.kwargs["ids"] == ["from 1", "from 3", "from 5"]
    for cases in mark.args[1]:
        test(cases=cases)
    assert seen == [0, 1, 2, 3, 4]


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        looped("number", [])
