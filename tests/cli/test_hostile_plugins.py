"""`emssd-plugins` on plugins that do their worst: it always ends, naming them or a rule, not with 0."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emssd.drafting import Draft, Drafter
from emssd.errors import PluginError
from emssd.sequences import Batch, Request, Row
from emssd.testing import authoring
from emssd.testing.authoring.watched import Notes, _watch, run_watched
from emssd.testing.conformance.rules import BrokenRule
from emssd.testing.conformance.watch import WatchedDrafter
from tests.support.tiers import looped

from .conftest import drafter


class Odd(BaseException):
    pass


def fail(error: BaseException) -> Any:
    raise error


PROPOSES: dict[str, tuple[Callable[[Any, Batch], Any], str, str]] = {
    "exits": (lambda drafter, batch: sys.exit(0), "drafter.raises", "raised SystemExit: 0"),
    "raises what is no Exception": (lambda drafter, batch: fail(Odd("own")), "drafter.raises", "raised Odd: own"),
    "recurses": (lambda drafter, batch: drafter.propose(batch, []), "drafter.raises", "raised RecursionError: maximum"),
    "edits tokens": (lambda drafter, batch: batch.rows[0].extend([1]), "drafter.batch", "changed tokens of"),
    "has no rows": (
        lambda drafter, batch: Draft(Draft.from_chains([[1]]).token_ids, None),  # type: ignore[arg-type]  # the fault
        "drafter.draft",
        "raised TypeError",
    ),
}


@looped("fault", PROPOSES)
def test_a_drafter_that_misbehaves_breaks_a_rule(fault: str) -> None:
    propose, rule, said = PROPOSES[fault]

    class Third(Drafter):
        def propose(self, batch: Batch, budget: Any) -> Any:
            return propose(self, batch)

    with pytest.raises(BrokenRule) as caught:
        WatchedDrafter(Third(), 7).propose(Batch((Row(Request("a", (1, 2), 9)),)), [2])
    assert caught.value.rule == rule
    assert said in caught.value.message


def test_options_that_exit_are_named(install: Callable, plugins: Callable) -> None:
    install("odd", drafter(options="value: int = field(default_factory=lambda: exit(0))"))
    assert plugins("check", "third").sentence == (
        "drafter 'third' (third-party-odd 1.2) failed in making its options: SystemExit: 0"
    )


@pytest.mark.nightly
def test_a_drafter_that_ends_the_process_is_named_with_the_rule(
    install: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    install("odd", drafter("__import__('os')._exit(0)"))
    with pytest.raises(PluginError) as caught:
        run_watched(["check", "third", "--examples", "1"])
    assert str(caught.value).startswith(
        "drafter 'third' (third-party-odd 1.2) ended the process (exit status 0) in the test of "
    )
    assert capfd.readouterr().out == "drafter third (third-party-odd 1.2), rule by rule:\n\n"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import time; time.sleep(600)", "was stopped after 0.01 s"),
        ("import os; os._exit(0)", "ended the process (exit status 0)"),
        ("import os; os.kill(os.getpid(), 9)", "ended the process (SIGKILL)"),
    ],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_who_was_at_work_when_a_process_ended_or_hung_is_named(
    is_done: bool, code: str, how: str, tmp_path: Path
) -> None:
    notes = Notes(str(tmp_path / "notes"))
    limit = 0.01 if "sleep" in code else None
    notes.note("plugin 'odd' of third-party-odd 1.2", "while it was loaded", limit)
    if is_done:
        notes._write({"status": 1, "limit": limit})
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        if is_done:
            assert _watch(child, tmp_path / "notes") == 1
        else:
            with pytest.raises(PluginError) as caught:
                _watch(child, tmp_path / "notes")
            assert str(caught.value).startswith(
                f"plugin 'odd' of third-party-odd 1.2 {how} while it was loaded; EMSSD_"
            )
        child.kill()


@pytest.mark.nightly
def test_the_command_has_a_process_of_its_own(
    install: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Starts it as a user does, by its command line alone."""
    monkeypatch.setenv("COLUMNS", "200")
    install("odd", drafter())
    monkeypatch.setattr(sys, "argv", ["emssd-plugins"])
    authoring.main()
    assert " third " in capfd.readouterr().out
    install("worse", "import os; os._exit(0)")
    with pytest.raises(SystemExit) as stop:
        authoring.main()
    assert stop.value.code == 2
    assert capfd.readouterr().err.startswith("emssd-plugins: error: plugin 'worse' of third-party-worse 1.2 ended")
