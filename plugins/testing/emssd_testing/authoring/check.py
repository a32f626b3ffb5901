"""``emssd-plugins check``: the conformance suite on an installed plugin, reported rule by rule."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emssd.errors import ConfigError, PluginError, UnsupportedModelError
from emssd.errors.faults import guarded
from emssd.errors.ranges import check_options
from emssd.hooks import DrafterSpec
from emssd.hooks.registry import Registry
from emssd_testing.authoring import QUICK
from emssd_testing.authoring.watched import Notes
from emssd_testing.conformance.process import process_kept
from emssd_testing.conformance.rules import RULES, rules_of

if TYPE_CHECKING:
    import pytest

__all__ = ["check"]

_SUITES = {
    "drafter": "DrafterConformance",
    "backend": "AttentionBackendConformance",
    "budget": "BudgetPolicyConformance",
}

_TEST_FILE = """from emssd_testing import {suite}


class TestPlugin({suite}):
    plugin = {name!r}
    options = {options!r}
    learns_across_requests = {learns!r}
    decides_at_random = {draws!r}
    derandomize = True
    shrinks = {shrinks!r}
"""


def check(options: Namespace, notes: Notes) -> int:
    """Test a plugin against the rules of its interface, and print the result of each. Returns 1 if one was broken."""
    if missing := [module for module in ("pytest", "hypothesis") if find_spec(module) is None]:
        raise PluginError(
            f"emssd-plugins check runs tests, and {' and '.join(missing)} cannot be imported; "
            f"pip install 'emssd[testing]'"
        )
    with process_kept() as changed:
        registry = notes.registry()
    if changed:
        raise PluginError(
            f"loading the plugins left {' and '.join(changed)} changed for the whole process; the plugin that does so "
            f"must set that back, and EMSSD_SKIP_PLUGINS=NAME leaves one out"
        )
    name, kind = options.name, options.kind or _kind(options.name, registry)
    spec = registry.find(kind, name)
    for flag, is_given, kinds, whose in (
        ("--learns-across-requests", options.learns_across_requests, ("drafter",), "drafters"),
        ("--decides-at-random", options.decides_at_random, ("drafter", "budget"), "drafters and policies"),
        ("--model", options.model is not None, ("drafter",), "drafters"),
    ):
        if is_given and kind not in kinds:
            raise ConfigError(f"{flag} is for {whose}, and {name!r} is a {kind}; leave it out")
    owner = registry.owner(kind, name)
    notes.note(owner, "before its tests")
    with guarded(owner, "making its options"):
        values = _values(spec.config, options.options, f"{kind} {name!r}")
    if isinstance(spec, DrafterSpec):
        notes.note(owner, "in build", options.timeout)
        _try_build(spec, values, options.model)
    print(f"{kind} {name} ({registry.source(kind, name)}), rule by rule:\n", flush=True)
    results = _Results(kind, lambda test: notes.note(owner, f"in the test of {test}", options.timeout))
    source = _TEST_FILE.format(
        suite=_SUITES[kind],
        name=name,
        options=values,
        learns=options.learns_across_requests,
        draws=options.decides_at_random,
        shrinks=options.thorough,
    )
    with guarded(owner, "its tests"):
        status = _run_pytest(source, None if options.thorough else options.examples or QUICK, options.model, results)
    status = results.print_and_judge(status, owner)
    if not (status or options.thorough or options.examples):
        print("before you publish it, let --thorough draw more examples")
    return status


def _kind(name: str, registry: Registry) -> str:
    kinds = [kind for kind in _SUITES if name in registry.names(kind)]
    if len(kinds) > 1:
        ways = " or ".join(f"--kind {kind}" for kind in kinds)
        raise PluginError(f"{name!r} is the name of a {' and of a '.join(kinds)}; add {ways}")
    if kinds:
        return kinds[0]
    offers = "; ".join(f"{kind}s are {', '.join(registry.names(kind))}" for kind in _SUITES)
    failed = [f"{record.name!r} of {record.distribution} failed to load: {record.reason}"
              for record in registry.records if record.state == "failed"]  # fmt: skip
    raise PluginError(". ".join([f"there is no drafter, backend or budget {name!r} to check; {offers}", *failed]))


def _values(config: type, options: Seq[str], owner: str) -> dict[str, Any]:
    """The options of the user, tried on the config, so that mistakes are found before anything runs."""
    from omegaconf.errors import OmegaConfBaseException

    from emssd_testing.conformance.suite import from_text, made

    if wrong := [option for option in options if "=" not in option]:
        raise ConfigError(f"{wrong[0]!r} is no option; write OPTION=VALUE, as in length=3")
    try:
        values = from_text(options)
        check_options(made(config, values))
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{owner} cannot take {' '.join(options) or 'its defaults'}: {reason}") from error
    return values


def _try_build(spec: DrafterSpec, values: dict[str, Any], model: str | None) -> None:
    """Refuse a drafter that says that it is none for the targets of the check; how else it fails, its rules tell."""
    from emssd_testing.conformance.scripted import VOCAB_SIZE
    from emssd_testing.conformance.setting import setting
    from emssd_testing.conformance.suite import made

    context = setting(model or "llama", VOCAB_SIZE).context
    try:
        spec.build(made(spec.config, values), context)
    except (ConfigError, UnsupportedModelError) as error:
        more = "" if model else "; if it was trained for one target, name that target's folder: --model DIR"
        target = model or "the small random target of this check"
        raise ConfigError(f"drafter {spec.name!r} cannot draft for {target}: {error}{more}") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise


def _run_pytest(source: str, num_examples: int | None, model: str | None, results: _Results) -> int:
    """Run one test file by itself: no settings, plugins or conftest of the folder that the user happens to be in."""
    import pytest

    from emssd_testing import pytest_plugin

    with tempfile.TemporaryDirectory(prefix="emssd-check-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_ADDOPTS", "")
        path = Path(folder) / f"test_{Path(folder).name.replace('-', '_')}.py"  # pytest knows modules by name
        path.write_text(source, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        arguments = [str(path), "-c", str(Path(folder) / "pytest.ini"), f"--rootdir={folder}", "--noconftest",
                     "--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider"]  # fmt: skip
        if num_examples is not None:
            arguments.append(f"--emssd-examples={num_examples}")
        if model is not None:
            arguments.append(f"--emssd-models={model}")
        return int(pytest.main(arguments, plugins=[pytest_plugin, results]))


class _Results:
    def __init__(self, kind: str, begin: Callable[[str], None]) -> None:
        self._begin = begin
        self._rules = rules_of(kind)
        self._broken: dict[str, str] = {}
        self._kept: set[str] = set()
        self._stopped: defaultdict[str, set[str]] = defaultdict(set)
        self._skipped: dict[str, str] = {}
        self._errors: list[str] = []
        self._costs: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        rules = [name for marker in item.iter_markers("emssd_rule") for name in marker.args]
        self._begin(f"{', '.join(rules) or 'the cost'} ({item.name})")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        notes = {name: str(value) for name, value in report.user_properties}
        names = notes.get("emssd_rules", "").split()
        if report.failed and "emssd_broken" in notes:
            self._broken.setdefault(notes["emssd_broken"], notes["emssd_message"])
            for name in names:
                self._stopped[name].add(notes["emssd_broken"])
        elif report.failed:
            self._errors.append(report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._skipped |= dict.fromkeys(names, reason.removeprefix("Skipped: "))
        elif report.when == "call":
            self._kept.update(names)
            self._costs += [notes["emssd_cost"]] if "emssd_cost" in notes else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    def print_and_judge(self, status: int, owner: str) -> int:
        for rule in self._rules:
            state, more = self._state(rule.name)
            print(f"{state:<8} {rule.name:<22} {rule.demand}")
            for line in more:
                print(f"{'':<8} {line}")
        for cost in self._costs:
            print(f"\ncost (not judged): {cost}")
        for error in self._errors:
            print(f"\na test could not run:\n{error}")
        kept = sum(self._state(rule.name)[0] == "ok" for rule in self._rules)
        num_broken, num_untested = len(self._broken), len(self._rules) - kept - len(self._broken)
        print(f"\n{kept} rules kept, {num_broken} broken, {num_untested} not tested")
        if status and not num_broken:
            print(f"{owner} is not cleared: its tests did not come to their end")
        return int(status != 0)

    def _state(self, name: str) -> tuple[str, list[str]]:
        if name in self._broken:
            return "BROKEN", [*self._broken[name].splitlines(), f"see {RULES[name].page}"]
        if name in self._stopped:
            return "?", [f"its test stopped at {', '.join(sorted(self._stopped[name]))}"]
        if name in self._skipped:
            return "skipped", [self._skipped[name]]
        return ("ok", []) if name in self._kept else ("?", ["its test could not run"])
