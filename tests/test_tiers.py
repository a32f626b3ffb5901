"""The tiers of tests."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiers import few, looped, only


@pytest.fixture
def call(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``call(test, *markers)`` runs `test` under a limit of 0.1 CPU seconds, on a machine that counts as quiet."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    monkeypatch.setattr(conftest, "_slowness", lambda: 1.0)  # a tracer slows its loop, too

    class Item:
        def iter_markers(self, name: str) -> list[str]:
            return [marker for marker in self.markers if marker == name]

    def run(test: Callable[[], object], *markers: str) -> None:
        item = Item()
        item.markers = markers
        steps = conftest._Limit(0.1).pytest_runtest_call(item)
        next(steps)
        test()
        with pytest.raises(StopIteration):
            steps.send(None)

    return run


def busy() -> None:
    begun = time.process_time()
    while time.process_time() - begun < 0.2:
        pass


def test_cpu_seconds_are_limited_and_waiting_is_not(call: Callable[..., None]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"used 0\.[2-9] s of CPU; CI allows 0\.1 s"):
        call(busy)
    call(busy, "costly")
    call(lambda: time.sleep(0.2))


def test_a_first_import_does_not_count(
    call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\nbegun = time.process_time()\nwhile time.process_time() - begun < 0.2: pass\n"
    (tmp_path / "slow_to_import.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    call(lambda: __import__("slow_to_import"))
    assert "slow_to_import" in sys.modules
    with pytest.raises(pytest.fail.Exception):
        call(lambda: (__import__("slow_to_import"), busy()))


def test_the_first_cases_stay_in_ci() -> None:
    cases = few([1, (2, 3), pytest.param(4, id="four")], ci=1)
    assert cases[0] == 1
    assert [(case.values, case.id, [mark.name for mark in case.marks]) for case in cases[1:]] == [
        ((2, 3), None, ["nightly"]),
        ((4,), "four", ["nightly"]),
    ]
    assert [isinstance(case, int) for case in only([1, 2, 3], ci=[2])] == [False, True, False]


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
    assert caught.value.__notes__ == ["the case was {'number': 2, 'word': 'two'}"]


def test_long_lists_are_several_tests() -> None:
    seen: list[int] = []

    @looped("number", range(5), at_a_time=2)
    def test(number: int) -> None:
        seen.append(number)

    (mark,) = test.pytestmark
    assert mark.kwargs["ids"] == ["from 1", "from 3", "from 5"]
    for chosen in mark.args[1]:
        test(chosen=chosen)
    assert seen == [0, 1, 2, 3, 4]


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        looped("number", [])
