"""Strangers' plugins, good and broken, installed as real distributions: what the user is told, and what still works."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd.errors import PluginError, PluginWarning
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped

from .conftest import drafter


def changed(old: str, new: str) -> str:
    return drafter().replace(old, new)


RETURNS, ENDS = "return [DrafterSpec(", "Third())]"
BROKEN = {  # beside those of docs/how_to/broken_plugin.md, which test_broken_plugin_page.py has
    "syntax": ("def (", "SyntaxError: invalid syntax"),
    "base": ("class Odd(BaseException): pass\nraise Odd('own')", "Odd: own"),
    "mute": (
        "class Odd(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Odd",
        "Odd: no message, as that raises SystemExit",
    ),
    "binary": (r"raise ValueError('\x1b[2J\0\n' + 9999 * 'x')", "ValueError: [2J xxx"),
    "hook_exits": (changed(RETURNS, "raise SystemExit(0) # "), "SystemExit: 0"),
    "hook_yields": (
        changed(RETURNS, "yield 1 / 0; [DrafterSpec("),
        "hook emssd_drafters returned <generator object em",
    ),
    "odd_name": (drafter(name="a b"), "the name of a drafter is 'a b'; give a text of letters, digits, "),
    "no_build": (changed("lambda config, context: Third()", "None"), "the build of drafter 'third' is None, which can"),
    "no_question": (changed(ENDS, "Third(), 'no')]"), "unavailable of drafter 'third' is 'no', which cannot be called"),
    "no_reason": (
        changed(ENDS, "Third(), lambda: True)]"),
        "unavailable of drafter 'third' returned True; give a reason or None",
    ),
    "twice": (changed(RETURNS, "return 2 * [DrafterSpec("), "drafter 'third' is already offered by third-party-twice"),
    "unavailable": (changed(ENDS, "Third(), lambda: 1 / 0)]"), "ZeroDivisionError: division by zero"),
}


@looped("name", BROKEN)
def test_a_broken_plugin_is_reported_and_the_others_work(name: str, install: Callable, tmp_path: Path) -> None:
    source, reason = BROKEN[name]
    install(name, source)
    with pytest.warns(PluginWarning) as warned:
        registry = Registry()
    message, *others = [str(warning.message) for warning in warned]
    assert not others
    assert message.startswith(f"plugin '{name}' of third-party-{name} 1.2 is not loaded: {reason}")
    assert {"draft_model", "llma", "none"} <= set(registry.names("drafter"))
    names = ", ".join(registry.names("drafter"))
    with pytest.raises(PluginError) as caught:
        registry.find("drafter", "third")
    assert str(caught.value) == f"unknown drafter 'third'; choose one of {names}. {message}"
    shutil.rmtree(tmp_path / f"site_{name}")  # the next case is alone


BUILDS = {  # as above
    "empty": ("[]", "built nothing; its build must return"),
    "other": ("[Third(), 'x']", "built str; its build must return"),
    "raises": ("{}['lost']", "failed in build: KeyError: 'lost'"),
    "negative": ("third(-1)", "has num_speculative_tokens -1; give a whole number, 0 or more"),
    "not a number": ("third(float('nan'))", "has num_speculative_tokens nan; give a whole number"),
    "bool": ("third(True)", "has num_speculative_tokens True; give a whole number"),
}


@looped("fault", BUILDS)
def test_a_drafter_that_cannot_be_built_is_named(fault: str, install: Callable) -> None:
    made, complaint = BUILDS[fault]
    helper = "\ndef third(most):\n    made = Third()\n    made.num_speculative_tokens = most\n    return made\n"
    install("odd", changed("config, context: Third()", f"config, context: {made}") + helper)
    registry = Registry()
    spec, config = registry.resolve("drafter", "third")
    with pytest.raises(PluginError) as caught:
        registry.build("drafter", spec, config, None)
    assert str(caught.value).startswith(f"drafter 'third' (third-party-odd 1.2) {complaint}")
    assert not registry.in_use


@looped(
    "kind, wanted",
    [
        ("backend", "an emssd.attention.AttentionBackend"),
        ("budget", "an emssd.drafting.BudgetPolicy"),
        ("data", "an iterable of emssd.data.Prompt"),
    ],
)
def test_other_kinds_that_build_something_else_are_named(kind: str, wanted: str, install: Callable) -> None:
    hook, record = KINDS[kind]
    source = changed("emssd_drafters", hook).replace("DrafterSpec", record.__name__)
    install("odd", source.replace("config, context: Third()", "config: 5"))
    registry = Registry()
    with pytest.raises(PluginError) as caught:
        registry.build(kind, *registry.resolve(kind, "third"))
    assert str(caught.value) == f"{kind} 'third' (third-party-odd 1.2) built int; its build must return {wanted}"


WAITS = "import threading\n[each.join() for each in threading.enumerate() if each.name == 'emssd-slow-plugin']\n"


def test_a_plugin_that_takes_long_is_named_and_can_be_left_out(
    install: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emssd.errors.faults._SLOW_SECONDS", 0.01)
    install("slow", WAITS + drafter())  # it ends when what is to be said has been said
    assert "third" in Registry().names("drafter")
    assert capsys.readouterr().err == (
        "emssd: plugin 'slow' of third-party-slow 1.2 is still being loaded after 0.01 s; "
        "EMSSD_SKIP_PLUGINS=third-party-slow runs without it\n"
    )
    for names in ("slow", "other, third-party-slow", "llma slow"):
        monkeypatch.setenv("EMSSD_SKIP_PLUGINS", names)
        registry = Registry()
        assert [(record.name, record.reason) for record in registry.records if record.state == "skipped"] == [
            ("slow", "EMSSD_SKIP_PLUGINS names it")
        ]
        assert "third" not in registry.names("drafter")
        assert "llma" in registry.names("drafter"), "emssd's own are always there"
        with pytest.raises(
            PluginError, match=r"plugin 'slow' of third-party-slow 1\.2 is not loaded: EMSSD_SKIP_PLUGINS"
        ):
            registry.find("drafter", "third")


@looped(
    "source, reason",
    [
        ("raise RuntimeError('no licence')",
         "plugin 'broken' of third-party-broken 1.2 is not loaded: RuntimeError: no licence"),
        (drafter(options="value: int = field(default_factory=lambda: __import__('sys').exit(0))"),
         "drafter 'third' of third-party-broken 1.2 is not loaded: Config cannot be an options class: SystemExit: 0"),
    ],
)  # fmt: skip
def test_the_command_line_warns_of_a_broken_plugin_and_runs_unless_it_is_strict(
    source: str, reason: str, install: Callable, decode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMSSD_STRICT", raising=False)
    install("broken", source)
    result = decode("max_new_tokens=2")
    assert result.err.startswith(f"emssd: warning: {reason}\n")
    assert len(result.rows) == 5
    sentence = decode("drafter=third").sentence
    assert sentence.startswith("unknown drafter 'third'; choose one of anpd, ")
    assert sentence.endswith(reason)
    monkeypatch.setenv("EMSSD_STRICT", "1")
    assert decode().sentence == reason


def test_a_good_plugin_is_listed_and_takes_options(
    install: Callable, decode: Callable, emssd: Callable, plugins: Callable
) -> None:
    install("good", drafter(options="depth: int = 4\n    names: dict = field(default_factory=dict)"))
    composed = emssd("drafter=third", "drafter.depth=5", "drafter.names.any=7", "--cfg", "job", "-p", "drafter").out
    assert "depth: 5" in composed
    assert "any: 7" in composed
    assert decode("drafter=third", "check=greedy").metrics["check"]["exact"] == 5
    (line,) = [line.split() for line in plugins().out.splitlines() if " third " in line]
    assert line == ["drafter", "third", "ready", "third-party-good", "1.2", "–"]


def words(text: str) -> list[str]:
    """The lines of a text, whose words are one space apart."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_list_of_plugins_shows_every_state_and_reasons_as_they_stand(
    install: Callable, plugins: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    reason = "pip install 'emssd[cuda]' brings it, and no [/opt/x.so] and no :smile:"
    install("absent", changed(ENDS, f"Third(), lambda: {reason!r})]"))
    absent = f"drafter third unavailable third-party-absent 1.2 {reason}"
    assert absent in words(plugins("list").out)
    install("broken", "raise RuntimeError('no licence')")
    install("later", drafter())
    with (tmp_path / "site_later" / "third_party_later-1.2.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: emssd>=99\n")
    result = plugins()
    assert result.status == 1
    lines = words(result.out)
    assert lines.count(absent) == 1
    assert lines.count("plugin broken failed third-party-broken 1.2 RuntimeError: no licence") == 1
    later = "plugin later failed third-party-later 1.2 it needs emssd>=99, and this is emssd"
    assert any(line.startswith(later) for line in lines)
    assert any(line.startswith("backend ragged ready emssd 0.") for line in lines)


def test_a_failing_drafter_is_named_and_finished_rows_are_kept(install: Callable, decode: Callable) -> None:
    """It fails at the last prompt, so that four rows are finished by then."""
    good = "if 'prompts.txt:6' not in batch.request_ids: return Draft.empty(len(batch))"
    install("late", drafter(f"{good}\n        return Draft.from_chains([[10**6]] * len(batch))"))
    complaint = (
        "drafter 'third' (third-party-late 1.2) broke its interface: it drafted token id 1000000, outside the target's "
        "vocabulary of 260; ids must be in 0..259"
    )
    options = ("drafter=third", "budget=fixed", "batch_size=1", "max_new_tokens=4")
    goes_on = decode(*options)
    assert len(goes_on.rows) == 5
    assert complaint in goes_on.err
    result = decode(*options, "on_drafter_error=fail")
    assert result.sentence == complaint
    assert [row["id"] for row in result.rows] == [f"prompts.txt:{line}" for line in (1, 2, 4, 5)]
    assert not (result.folder / "metrics.json").exists()


def test_a_prompt_source_of_a_plugin_writes_answers(install: Callable, decode: Callable) -> None:
    """It needs no options of ours."""
    install(
        "answers",
        """
from dataclasses import dataclass
from emssd.data import FailedPrompt, Prompt
from emssd.hooks import PromptSourceSpec, hookimpl

@dataclass
class Config:
    path: str = ""
    temperature: float = 0.0
    mark: str = "!"

def prompts(config):
    return [Prompt("b", "bb"), FailedPrompt("c", f"c {config.mark}"), Prompt("a", "aa")]

def write(answered, failed, model, load_tokenizer):
    assert failed[0].error != "c ?"
    for prompt, rows in answered:
        yield f"{prompt.prompt_id}: {[load_tokenizer().decode(row['token_ids']) == row['text'] for row in rows]}"
    yield from (item.error for item in failed)

@hookimpl
def emssd_prompt_sources():
    return [PromptSourceSpec("asked", Config, prompts, None, "answers.txt", write)]
""",
    )
    options = ("data=asked", "max_new_tokens=2", "ignore_eos=true")
    result = decode(*options)
    assert result.files["answers.txt"] == "b: [True]\na: [True]\nc !\n"
    assert "errors.jsonl, answers.txt" in result.out
    failed = decode(*options, "data.mark=?")
    assert failed.sentence == "data 'asked' (third-party-answers 1.2) failed in write_answers: AssertionError"
    assert "answers.txt" not in failed.files
    assert decode(*options).files.keys() > {"answers.txt"}
    assert "answers.txt" not in decode().files
    sentence = decode(*options, "sampling.temperature=1").sentence
    assert sentence.startswith("sampling.temperature is 1.0; with data=asked each request names its own")
    assert decode(*options, "output_dir=-", "overwrite=false").sentence.endswith(
        "and no file, which data=asked needs; set output_dir to a folder"
    )
