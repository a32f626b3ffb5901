"""`emssd-plugins check` on strangers' plugins: rule by rule what was kept, broken or left out, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd import __version__
from emssd.testing import authoring
from emssd.testing.conformance.rules import rules_of
from emssd.testing.conformance.setting import setting
from tests.support.perfect_head import VOCAB, perfect_target, random_head
from tests.support.tiers import looped

from .conftest import drafter

GREEDY = "return Draft.from_chains([[row.tokens[-1]] * limit for row, limit in zip(batch, budget)])"
NUM_RULES = len(rules_of("drafter"))


def test_check_reports_a_good_plugin_rule_by_rule(install: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    install("good", drafter(GREEDY, options="depth: int = 4"))
    authoring.main(["check", "third", "depth=5", "--examples", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "drafter third (third-party-good 1.2), rule by rule:"
    assert [line.split()[:2] for line in lines[2 : 2 + NUM_RULES]] == [
        ["ok", rule.name] for rule in rules_of("drafter")
    ]
    assert lines[-3].startswith("cost (not judged): ")
    assert lines[-1] == f"{NUM_RULES} rules kept, 0 broken, 0 not tested"


def test_check_of_a_budget_policy(capsys: pytest.CaptureFixture[str]) -> None:
    authoring.main(["check", "fixed", "num_tokens=2", "--examples", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"budget fixed (emssd {__version__}), rule by rule:"
    assert [line.split()[:2] for line in lines[2:-2]] == [["ok", rule.name] for rule in rules_of("budget")]
    assert lines[-1] == f"{len(rules_of('budget'))} rules kept, 0 broken, 0 not tested"


@pytest.mark.costly("all rules, and a smallest example of the broken one")
def test_check_names_the_rule_that_is_broken_and_exits_with_1(
    install: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # the settings of the folder and the user do not matter
    install("long", drafter(GREEDY.replace("* limit", "* (limit + 1)")))
    with pytest.raises(SystemExit) as stop:
        authoring.main(["check", "third", "--kind", "drafter", "--examples", "1"])
    assert stop.value.code == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    place = lines.index("BROKEN drafter.budget it drafts at most budget[row] tokens for a row")
    assert "with a budget of" in lines[place + 1]
    assert lines[place + 2] == "see docs/reference/drafter_rules.md#drafter-budget"
    assert "ok drafter.pickle its options survive pickle, copy and deepcopy" in lines
    assert lines[lines.index("? drafter.lossless the tokens are those of plain greedy decoding") + 1] == (
        "its test stopped at drafter.budget"
    )
    assert lines[-1].endswith("rules kept, 1 broken, 15 not tested")
    assert os.environ["PYTEST_ADDOPTS"] == "--no-such-option"


LEARNS = (
    "self.__dict__.setdefault('calls', []).append(len(batch)); "
    "return Draft.from_chains([[sum(self.calls) % 2][:limit] for limit in budget])"
)
DRAWS = "import random; return Draft.from_chains([[random.randrange(2)][:limit] for limit in budget])"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "broken", "way_out"),
    [
        (LEARNS, "isolation", "learns_across_requests = True in its test class, or --learns-across-requests to "),
        (DRAWS, "deterministic", ""),
    ],
)
def test_check_finds_a_drafter_that_does_not_say_what_it_does(
    source: str, broken: str, way_out: str, install: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    install("odd", drafter(source))
    with pytest.raises(SystemExit):
        authoring.main(["check", "third", "--examples", "5"])
    said = capsys.readouterr().out
    assert f"\nBROKEN   drafter.{broken} " in said
    assert way_out in said


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
    source: str | None, flag: str, rules: list[str], reason: str, install: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, name = ("budget", "fixed") if source is None else ("drafter", "third")
    if source is not None:
        install("odd", drafter(source))
    authoring.main(["check", name, "--examples", "1", flag])
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[1]: lines[place + 1].strip() for place, line in enumerate(lines) if line.startswith("skip")}
    assert found == {f"{kind}.{rule}": reason for rule in rules}
    assert lines[-1] == f"{len(rules_of(kind)) - len(found)} rules kept, 0 broken, {len(found)} not tested"


WRONG = {
    "lama": "there is no drafter, backend or budget 'lama' to check; drafters are .*llma.*; backends are .*ragged",
    "llma --kind backend": "unknown backend 'llma'; choose one of",
    "llma 7": "'7' is no option; write OPTION=VALUE, as in length=3",
    "llma length=7": "drafter 'llma' cannot take length=7: Key 'length' not in 'LLMAConfig'",
    "llma copy_length=x": "drafter 'llma' cannot take copy_length=x: Value 'x'",
    "llma copy_length=${": r"drafter 'llma' cannot take copy_length=\${: no viable alternative at input",
    "cascade drafters=[a": r"the value of 'drafters=\[a' is no YAML: expected ',' or ']', .*; write it as",
    "ragged --decides-at-random": "--decides-at-random is for drafters and policies, and 'ragged' is a backend",
    "ragged --learns-across-requests": "--learns-across-requests is for drafters, and 'ragged' is a backend",
    "ragged --model here": "--model is for drafters, and 'ragged' is a backend; leave it out",
    "llma --model nowhere": "'nowhere' is no folder of a model, nor a tiny model's architecture: opt, llama, ",
}


@looped("given", WRONG)
def test_check_of_what_cannot_be_checked(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        authoring.main(["check", *given.split(" ")])
    assert stop.value.code == 2
    assert re.match(f"emssd-plugins: error: {WRONG[given]}", capsys.readouterr().err)


@pytest.mark.parametrize("options", ["path: str", "path: str = '???'"])
def test_check_of_a_plugin_that_needs_an_option(
    options: str, install: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    install("needs", drafter(GREEDY, options=options))
    with pytest.raises(SystemExit):
        authoring.main(["check", "third"])
    assert capsys.readouterr().err == (
        "emssd-plugins: error: Config.path has no default and is not given; give it, as in path=VALUE\n"
    )
    authoring.main(["check", "third", "path=here", "--examples", "1"])
    assert capsys.readouterr().out.endswith(f"\n{NUM_RULES} rules kept, 0 broken, 0 not tested\n")


def test_check_of_a_trained_head_needs_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        authoring.main(["check", "eagle3", f"path={random_head('eagle3').path}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("emssd-plugins: error: drafter 'eagle3' cannot draft for the small random target of this ")
    assert said.endswith("; if it was trained for one target, name that target's folder: --model DIR\n")


@pytest.mark.nightly
def test_check_of_a_trained_head_on_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: None
) -> None:
    for part in (perfect_target(64), setting("llama", VOCAB).context.tokenizer):
        part.save_pretrained(tmp_path)
    head = [f"path={random_head('eagle3').path}", "depth=2"]
    authoring.main(["check", "eagle3", *head, "--model", f"{tmp_path}", "--examples", "1"])
    assert capsys.readouterr().out.endswith(f"\n{NUM_RULES} rules kept, 0 broken, 0 not tested\n")


def test_check_without_pytest_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emssd.testing.authoring.check.find_spec", lambda name: None if name == "hypothesis" else name)
    with pytest.raises(SystemExit):
        authoring.main(["check", "llma"])
    assert capsys.readouterr().err == (
        "emssd-plugins: error: emssd-plugins check runs tests, and hypothesis cannot be imported; "
        "pip install 'emssd[testing]'\n"
    )
