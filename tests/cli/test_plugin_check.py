"""`emssd-plugins` on strangers' plugins, also those that do their worst: it always ends, naming them or a rule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from warnings import simplefilter

import pytest
import torch
from emssd_testing import authoring
from emssd_testing.authoring.watched import Notes, _watch, run_watched
from emssd_testing.conformance.rules import BrokenRule, rules_of
from emssd_testing.conformance.setting import setting
from emssd_testing.conformance.watch import WatchedDrafter

from emssd import __version__
from emssd.drafting import Draft, Drafter
from emssd.errors import PluginError
from emssd.sequences import Batch, Request, Row
from tests.support.perfect_head import VOCAB, perfect_target
from tests.support.random_drafters import random_head
from tests.support.tiers import looped

from .conftest import drafter

GREEDY = "return Draft.from_chains([[row.tokens[-1]] * limit for row, limit in zip(batch, budget)])"
ALL_KEPT = f"\n{len(rules_of('drafter'))} rules kept, 0 broken, 0 not tested\n"


@pytest.mark.parametrize("kind", ["drafter", "budget"])
def test_check_reports_what_is_right_rule_by_rule(kind: str, install: Callable, plugins: Callable) -> None:
    install("good", drafter(GREEDY, options="depth: int = 4"))
    given, name = {
        "drafter": (["third", "depth=5"], "drafter third (third-party-good 1.2)"),
        "budget": (["fixed", "num_tokens=2"], f"budget fixed (emssd {__version__})"),
    }[kind]
    lines = plugins("check", *given, "--examples", "1").out.splitlines()
    rules = rules_of(kind)
    assert lines[0] == f"{name}, rule by rule:"
    assert [line.split()[:2] for line in lines[2 : 2 + len(rules)]] == [["ok", rule.name] for rule in rules]
    assert lines[-3].startswith("cost (not judged): ") == (kind == "drafter")
    assert lines[-1] == f"{len(rules)} rules kept, 0 broken, 0 not tested"


@pytest.mark.costly("all rules, and a smallest example of the broken one")
def test_check_names_the_rule_that_is_broken_and_exits_with_1(
    install: Callable, plugins: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # the settings of the folder and the user do not matter
    install("long", drafter(GREEDY.replace("* limit", "* (limit + 1)")))
    result = plugins("check", "third", "--kind", "drafter", "--examples", "1")
    assert result.status == 1
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    place = lines.index("BROKEN drafter.budget it drafts at most budget[row] tokens for a row")
    assert "with a budget of" in lines[place + 1]
    assert lines[place + 2] == "see docs/reference/drafter_rules.md#drafter-budget"
    assert "ok drafter.pickle its options survive pickle, copy and deepcopy" in lines
    assert lines[lines.index("? drafter.lossless the tokens are those of plain greedy decoding") + 1] == (
        "its test stopped at drafter.budget"
    )
    assert lines[-1].endswith("rules kept, 1 broken, 6 not tested")
    assert os.environ["PYTEST_ADDOPTS"] == "--no-such-option"


LEARNS = (
    "self.__dict__.setdefault('calls', []).append(len(batch)); "
    "return Draft.from_chains([[sum(self.calls) % 2][:limit] for limit in budget])"
)
DRAWS = "import random; return Draft.from_chains([[random.randrange(2)][:limit] for limit in budget])"


EXITS = r"__import__('os').write(1, b'\xff\0\x1b[2J'); raise SystemExit(0)"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "examples", "broken", "said"),
    [
        (LEARNS, "5", "isolation", "learns_across_requests = True in its test class, or --learns-across-requests to "),
        (DRAWS, "5", "deterministic", ""),
        (EXITS, "1", "raises", " 1 broken, 16 not tested\n"),
    ],
)
def test_check_finds_a_drafter_that_does_not_say_what_it_does(
    source: str, examples: str, broken: str, said: str, install: Callable, plugins: Callable
) -> None:
    install("odd", drafter(source))
    result = plugins("check", "third", "--examples", examples)
    assert result.status == 1
    assert f"\nBROKEN   drafter.{broken} " in result.out
    assert said in result.out


ALIKE = ["isolation", "release", "preemption"]


@pytest.mark.parametrize(
    ("source", "flag", "rules", "reason"),
    [
        (LEARNS, "--learns-across-requests", ALIKE, "it learns across requests, and its drafts are not compared"),
        (DRAWS, "--decides-at-random", ["deterministic", *ALIKE],
         "it drafts at random, and its drafts are not compared"),
        (None, "--decides-at-random", ["deterministic", "release", "preemption"],
         "it decides at random, and its decisions are not compared"),
    ],
    ids=["learns", "draws", "policy"],
)  # fmt: skip
def test_check_leaves_out_what_cannot_be_compared(
    source: str | None, flag: str, rules: list[str], reason: str, install: Callable, plugins: Callable
) -> None:
    kind, name = ("budget", "fixed") if source is None else ("drafter", "third")
    if source is not None:
        install("odd", drafter(source))
    lines = plugins("check", name, "--examples", "1", flag).out.splitlines()
    found = {line.split()[1]: lines[place + 1].strip() for place, line in enumerate(lines) if line.startswith("skip")}
    assert found == {f"{kind}.{rule}": reason for rule in rules}
    assert lines[-1] == f"{len(rules_of(kind)) - len(found)} rules kept, 0 broken, {len(found)} not tested"


WRONG = {
    "lama": "there is no drafter, backend or budget 'lama' to check; drafters are .*llma.*; backends are .*ragged",
    "llma --kind backend": "unknown backend 'llma'; choose one of",
    "llma 7": "'7' is no option; write OPTION=VALUE, as in length=3",
    "llma length=7": "drafter 'llma' cannot take length=7: Key 'length' not in 'LLMAConfig'",
    "llma copy_length=x": "drafter 'llma' cannot take copy_length=x: Value 'x'",
    "llma copy_length=0": "copy_length is 0; it must be at least 1",
    "llma copy_length=${": r"drafter 'llma' cannot take copy_length=\${: no viable alternative at input",
    "cascade drafters=[a": r"the value of 'drafters=\[a' is no YAML: expected ',' or ']', .*; write it as",
    "ragged --decides-at-random": "--decides-at-random is for drafters and policies, and 'ragged' is a backend",
    "ragged --learns-across-requests": "--learns-across-requests is for drafters, and 'ragged' is a backend",
    "ragged --model here": "--model is for drafters, and 'ragged' is a backend; leave it out",
    "llma --model nowhere": "'nowhere' is no folder of a model, nor a tiny model's architecture: opt, llama, ",
}


@looped("given", WRONG)
def test_check_of_what_cannot_be_checked(given: str, plugins: Callable) -> None:
    assert re.match(WRONG[given], plugins("check", *given.split(" ")).sentence)


@pytest.mark.parametrize("options", ["path: str", "path: str = '???'"])
def test_check_of_a_plugin_that_needs_an_option(options: str, install: Callable, plugins: Callable) -> None:
    install("needs", drafter(GREEDY, options=options))
    assert plugins("check", "third").sentence == (
        "Config.path has no default and is not given; give it, as in path=VALUE"
    )
    assert plugins("check", "third", "path=here", "--examples", "1").out.endswith(ALL_KEPT)


def test_check_of_a_trained_head_needs_its_target(plugins: Callable) -> None:
    said = plugins("check", "eagle3", f"path={random_head('eagle3')}").sentence
    assert said.startswith("drafter 'eagle3' cannot draft for the small random target of this ")
    assert said.endswith("; if it was trained for one target, name that target's folder: --model DIR")


@pytest.mark.nightly
def test_check_of_a_trained_head_on_its_target(tmp_path: Path, plugins: Callable, kernels: None) -> None:
    for part in (perfect_target(64), setting("llama", VOCAB).context.tokenizer):
        part.save_pretrained(tmp_path)
    head = [f"path={random_head('eagle3')}", "depth=2"]
    result = plugins("check", "eagle3", *head, "--model", f"{tmp_path}", "--examples", "1")
    assert result.out.endswith(ALL_KEPT)


def test_check_without_pytest_says_what_to_install(plugins: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emssd_testing.authoring.check.find_spec", lambda name: None if name == "hypothesis" else name)
    assert plugins("check", "llma").sentence == (
        "emssd-plugins check runs tests, and hypothesis cannot be imported; pip install 'emssd[testing]'"
    )


class Odd(BaseException):
    pass


def fail(error: BaseException) -> Any:
    raise error


PROPOSES: dict[str, tuple[Callable[[Any, Batch], Any], str, str]] = {
    "exits": (lambda drafter, batch: sys.exit(0), "drafter.raises", "raised SystemExit: 0"),
    "raises what is no Exception": (lambda drafter, batch: fail(Odd("own")), "drafter.raises", "raised Odd: own"),
    "recurses": (lambda drafter, batch: drafter.propose(batch, []), "drafter.raises", "raised RecursionError: maximum"),
    "edits tokens": (lambda drafter, batch: batch.rows[0].extend([1]), "drafter.batch", "changed tokens of"),
    "writes to a row": (
        lambda drafter, batch: setattr(batch.rows[0], "num_cached", 1),
        "drafter.batch",
        "changed num_cached of request 'a'",
    ),
    "sets the dtype": (lambda *_: torch.set_default_dtype(torch.half), "drafter.process", "the default dtype changed"),
    "sets the device": (lambda *_: torch.set_default_device("meta"), "drafter.process", "the default device changed"),
    "enters autocast": (lambda *_: torch.set_autocast_enabled("cpu", True), "drafter.process", "left autocast changed"),
    "makes errors of warnings": (lambda *_: simplefilter("error"), "drafter.process", "left warnings.filters changed"),
    "empties the environment": (lambda *_: os.environ.clear(), "drafter.process", "left os.environ changed"),
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


@looped(
    ("code", "setting"),
    [
        ("import os; os.environ.clear()", "os.environ"),
        ("import torch; torch.set_default_device('meta')", "the default device"),
    ],
)
def test_check_of_plugins_that_change_the_process_while_they_are_loaded(
    code: str, setting: str, install: Callable, plugins: Callable
) -> None:
    install("odd", f"{code}\n{drafter()}")
    said = plugins("check", "third").sentence
    assert said.startswith(f"loading the plugins left {setting} changed for the whole process; the plugin that does so")


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
