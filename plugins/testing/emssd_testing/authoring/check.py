"""``emssd-plugins check``: the conformance suite on an installed plugin, reported rule by rule."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence as Seq
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from emssd.errors import ConfigError, PluginError, UnsupportedModelError
from emssd.errors.faults import guarded
from emssd.errors.ranges import check_options
from emssd.hooks import DrafterSpec
from emssd.hooks.registry import Registry
from emssd_testing.authoring import QUICK
from emssd_testing.authoring.watched import Notes
from emssd_testing.conformance.process import process_kept
from emssd_testing.conformance.rules import RULES, broken_rule, rules_of

if TYPE_CHECKING:
    from emssd_testing.conformance.suite import Suite

__all__ = ["check"]

_SUITES = {
    "drafter": "DrafterConformance",
    "backend": "AttentionBackendConformance",
    "budget": "BudgetPolicyConformance",
}


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
    results = _Results(kind)
    with guarded(owner, "its tests"):
        tests = _suite(kind, spec, values, options)
        for test, rules in tests.rules_by_test().items():
            notes.note(owner, f"in the test of {', '.join(rules) or 'the cost'} ({test})", options.timeout)
            results.run(tests(), test, rules)
    status = results.print_and_judge(owner)
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


def _suite(kind: str, spec: Any, values: dict[str, Any], options: Namespace) -> type[Suite]:
    """The test class that the plugin's author would write, with what the command line says."""
    import emssd_testing

    suite: type[Suite] = getattr(emssd_testing, _SUITES[kind])
    attributes = {
        "plugin": spec.name,
        "spec": lambda self: spec,
        "options": values,
        "models": (options.model,) if options.model else suite.models,
        "num_examples": None if options.thorough else options.examples or QUICK,
        "learns_across_requests": options.learns_across_requests,
        "decides_at_random": options.decides_at_random,
        "derandomize": True,
        "shrinks": options.thorough,
    }
    return type("TestPlugin", (suite,), attributes)


class _Results:
    """The worst result of each rule."""

    def __init__(self, kind: str) -> None:
        self._rules = rules_of(kind)
        self._found: dict[tuple[str, str], list[str]] = {}  # lines by rule and state
        self._errors, self._costs = list[str](), list[str]()

    def run(self, tests: Suite, name: str, rules: Seq[str]) -> None:
        """Run the test of this name, which tests these rules; what it prints is not shown."""
        import pytest

        state, lines = "ok", list[str]()
        try:
            with redirect_stdout(StringIO()):
                getattr(tests, name)()
            self._costs += [tests.cost] * bool(tests.cost)
        except pytest.skip.Exception as skipped:
            state, lines = "skipped", [str(skipped)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if (rule := broken_rule(error)) is None:
                self._errors.append("".join(format_exception(error)))
                return
            self._found.setdefault((rule.rule, "BROKEN"), [*rule.message.splitlines(), f"see {RULES[rule.rule].page}"])
            state, lines = "?", [f"its test stopped at {rule.rule}"]
        for tested in rules:
            self._found.setdefault((tested, state), lines)

    def print_and_judge(self, owner: str) -> int:
        """Print all of it. Returns 1 if a rule was broken, or a test could not run."""
        counts = Counter[str]()
        for rule in self._rules:
            states = (state for state in ("BROKEN", "?", "skipped", "ok") if (rule.name, state) in self._found)
            state = next(states, "?")
            counts[state] += 1
            print(f"{state:<8} {rule.name:<22} {rule.demand}")
            for line in self._found.get((rule.name, state), ["its test could not run"]):
                print(f"{'':<8} {line}")
        for cost in self._costs:
            print(f"\ncost (not judged): {cost}")
        for error in self._errors:
            print(f"\na test could not run:\n{error}")
        num_untested = counts["?"] + counts["skipped"]
        print(f"\n{counts['ok']} rules kept, {counts['BROKEN']} broken, {num_untested} not tested")
        if self._errors and not counts["BROKEN"]:
            print(f"{owner} is not cleared: its tests did not come to their end")
        return int(bool(self._errors or counts["BROKEN"]))
