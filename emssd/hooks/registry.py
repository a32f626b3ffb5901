"""Finds installed plugins, one entry point at a time, and resolves what they offer by name."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from emssd.errors import ConfigError, PluginError, PluginWarning, did_you_mean
from emssd.errors.faults import described, guarded, named_if_slow
from emssd.errors.ranges import check_options
from emssd.hooks import hookspecs
from emssd.hooks.hookspecs import HOOKS, KINDS, Spec, check_spec, held, specs_of, unmet_requirement

if TYPE_CHECKING:
    from emssd.drafting.rule import VerificationRule

__all__ = ["KINDS", "Registry", "verification_rule"]

_SKIP = "EMSSD_SKIP_PLUGINS"
_HOOKS = ", ".join(hook for hook, _ in HOOKS.values())


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """The load status of an entry point, or of one of its offers.

    Attributes:
        kind: ``drafter``, ``backend``, ``budget``, ``data``, ``rule``, or ``plugin`` where nothing was offered.
        name: of what is offered, or of the entry point.
        state: ``ready``, ``unavailable`` (cannot run on this machine), ``failed``, or ``skipped`` (the user said so).
        reason: why it is not ready.
    """

    kind: str
    name: str
    distribution: str
    version: str
    state: str
    reason: str = ""


class Registry:
    """All plugins of entry point group ``emssd``; those of emssd itself come first, so that nobody takes their names.

    Args:
        group: entry points to load; the installed ones by default.
        on_load: called with the name, as messages have it, of each plugin from elsewhere before it is loaded.

    Attributes:
        in_use: what `build` has built, by kind and name, until somebody clears it.

    A plugin that fails is recorded and warned of, and does not stop the rest; with ``EMSSD_STRICT=1`` it raises. One
    that hangs, or ends the process, is named on stderr in time, and is left out if ``EMSSD_SKIP_PLUGINS`` names it
    or its distribution.
    """

    def __init__(
        self, group: Iterable[EntryPoint] | None = None, on_load: Callable[[str], None] = lambda owner: None
    ) -> None:
        self.records: list[PluginRecord] = []
        self.in_use: dict[tuple[str, str], PluginRecord] = {}
        self._offers: dict[tuple[str, str], tuple[Spec, PluginRecord]] = {}
        points = list(entry_points(group="emssd") if group is None else group)
        origins = {  # metadata may be missing, or tell neither; each look parses all of it
            dist: ((dist and dist.name) or "?", (dist and dist.version) or "?") for dist in {p.dist for p in points}
        }
        for point in sorted(points, key=lambda point: (origins[point.dist][0] != "emssd", point.name)):
            self._take(point, *origins[point.dist], on_load)

    def names(self, kind: str) -> list[str]:
        """Names of what is offered, sorted."""
        return sorted(name for other, name in self._offers if other == kind)

    def specs(self, kind: str) -> list[Spec]:
        """The offers, sorted by name."""
        return [self._offers[kind, name][0] for name in self.names(kind)]

    def source(self, kind: str, name: str) -> str:
        """Distribution and version behind a name."""
        record = self._offers[kind, name][1]
        return f"{record.distribution} {record.version}"

    def find(self, kind: str, name: str, presets: Iterable[str] = ()) -> Spec:
        """The offer called `name`. Raises PluginError: there is none, its plugin failed, or it cannot run here.

        The message also has `presets`, names that the caller knows beside the plugins.
        """
        if (kind, name) not in self._offers:
            names = sorted({*self.names(kind), *presets})
            guess = did_you_mean(name, names) or ";"
            message = f"unknown {kind} {name!r}{guess} choose one of {', '.join(names)}"
            absent = (record for record in self.records if record.state in ("failed", "skipped"))
            raise PluginError(". ".join([message, *map(_failure, absent)]))
        spec, record = self._offers[kind, name]
        if record.state == "unavailable":
            raise PluginError(f"{kind} {name!r} is not available: {record.reason}.")
        return spec

    def configured(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        """The config of the plugin `name` with these `options`. Raises ConfigError: it has no such option."""
        config = self.find(kind, name).config
        names = [field.name for field in dataclasses.fields(config)]
        for option in options:
            if option not in names:
                guess = did_you_mean(option, names) or "."
                raise ConfigError(
                    f"{kind} {name!r} has no option {option!r}{guess} It has {', '.join(names) or 'none'}"
                )
        made = config(**options)
        check_options(made, kind)
        return made

    def withdraw(self, kind: str, name: str, reason: str) -> None:
        """Offer `name` no longer, because of a fault found after loading; reported as if loading had failed."""
        _, record = self._offers.pop((kind, name))
        self.records.remove(record)
        self._report(dataclasses.replace(record, state="failed", reason=reason))

    def resolve(self, kind: str, choice: Any) -> tuple[Spec, Any]:
        """The spec and config of `choice`: a name, or an instance of a plugin's config dataclass. Raises as `find`."""
        if isinstance(choice, str):
            spec = self.find(kind, choice)
            with guarded(self.owner(kind, choice), "making its options"):
                return spec, spec.config()
        for spec in self.specs(kind):
            if isinstance(choice, spec.config):
                check_options(choice, kind)
                return self.find(kind, spec.name), choice
        raise ConfigError(
            f"{kind} is a {type(choice).__name__}; give a name ({', '.join(self.names(kind))}) or a plugin's config"
        )

    def build(self, kind: str, spec: Spec, config: Any, *arguments: Any) -> Any:
        """Build `spec` with `config` and `arguments`, test the result, and note it as in use."""
        owner = self.owner(kind, spec.name)
        with guarded(owner, "build"):
            made = held(spec.build(config, *arguments), kind, owner)
            for drafter in (made if isinstance(made, list) else [made]) if kind == "drafter" else ():
                drafter.label = drafter.label or spec.name
        self.in_use[kind, spec.name] = self._offers[kind, spec.name][1]
        return made

    def owner(self, kind: str, name: str) -> str:
        """The words by which messages call the plugin `name`."""
        return f"{kind} {name!r} ({self.source(kind, name)})"

    def _take(self, point: EntryPoint, distribution: str, version: str, on_load: Callable[[str], None]) -> None:
        ours = distribution == "emssd"
        whole = PluginRecord("plugin", point.name, distribution, version, "failed")
        owner = f"plugin {point.name!r} of {distribution} {version}"
        watch = nullcontext() if ours else named_if_slow(owner, f"{_SKIP}={distribution} runs without it")
        if not ours:
            if {point.name, distribution} & {*os.environ.get(_SKIP, "").replace(",", " ").split()}:
                self.records.append(dataclasses.replace(whole, state="skipped", reason=f"{_SKIP} names it"))
                return
            on_load(owner)
        try:
            with watch:
                offers = self._load(point, distribution, version)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a stranger's module does must not take the others down
            self._report(dataclasses.replace(whole, reason=described(error)))
        else:
            self._offers |= offers
            self.records.extend(record for _, record in offers.values())

    def _report(self, record: PluginRecord) -> None:
        self.records.append(record)
        if os.environ.get("EMSSD_STRICT") == "1":
            raise PluginError(_failure(record))
        warnings.warn(_failure(record), PluginWarning, stacklevel=2)

    def _load(
        self, point: EntryPoint, distribution: str, version: str
    ) -> dict[tuple[str, str], tuple[Spec, PluginRecord]]:
        """All that one entry point offers; all or nothing."""
        if distribution != "emssd" and (reason := unmet_requirement(distribution)):
            raise PluginError(reason)
        manager = pluggy.PluginManager("emssd")
        manager.add_hookspecs(hookspecs)
        manager.register(point.load(), name=point.name)
        try:
            manager.check_pending()  # a misspelt hook is an error, not silence
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{error}; the hooks are {_HOOKS}") from None
        offers: dict[tuple[str, str], tuple[Spec, PluginRecord]] = {}
        for kind, (hook, _) in HOOKS.items():
            implementations = getattr(manager.hook, hook).get_hookimpls()  # one by one, as pluggy passes over a None
            for spec in [spec for one in implementations for spec in specs_of(one.function(), kind)]:
                check_spec(spec, kind)
                if earlier := offers.get((kind, spec.name)) or self._offers.get((kind, spec.name)):
                    raise PluginError(f"{kind} {spec.name!r} is already offered by {earlier[1].distribution}")
                reason = spec.unavailable() if spec.unavailable else None
                if reason is not None and not isinstance(reason, str):
                    raise PluginError(f"unavailable of {kind} {spec.name!r} returned {reason!r}; give a reason or None")
                state = "unavailable" if reason else "ready"
                record = PluginRecord(kind, spec.name, distribution, version, state, reason or "")
                offers[kind, spec.name] = spec, record
        if not offers:
            raise PluginError(f"none of the hooks {_HOOKS} returns anything")
        return offers


@cache
def verification_rule(name: str) -> VerificationRule:
    """The rule of verification that the plugin `name` offers. Raises PluginError: it offers none, or failed."""
    registry = Registry(entry_points(group="emssd", name=name))
    spec = registry.find("rule", name)
    rule: VerificationRule = registry.build("rule", spec, spec.config())
    return rule


def _failure(record: PluginRecord) -> str:
    return f"{record.kind} {record.name!r} of {record.distribution} {record.version} is not loaded: {record.reason}"
