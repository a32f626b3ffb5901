"""Finds installed plugins, one entry point at a time, and resolves what they offer by name."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from emssd import hookspecs
from emssd.errors import ConfigError, PluginError, PluginWarning, did_you_mean
from emssd.hookspecs import Spec
from emssd.plugins.requirements import unmet_requirement

__all__ = ["KINDS", "PluginRecord", "Registry"]

KINDS = {
    "drafter": "emssd_drafters",
    "backend": "emssd_attention_backends",
    "budget": "emssd_budget_policies",
    "data": "emssd_prompt_sources",
}


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one entry point, or of one thing it offers.

    Attributes:
        kind: ``drafter``, ``backend``, ``budget``, ``data``, or ``plugin`` where nothing was offered.
        name: of what is offered, or of the entry point.
        distribution, version: the installed package.
        state: ``ready``, ``unavailable`` (cannot run on this machine) or ``failed``.
        reason: why it is not ready.
    """

    kind: str
    name: str
    distribution: str
    version: str
    state: str
    reason: str = ""


class Registry:
    """All plugins of entry point group ``emssd``.

    Args:
        group: entry points to load; the installed ones by default.

    A plugin that fails is recorded and warned of, and does not stop the rest. With ``EMSSD_STRICT=1`` it raises.
    """

    def __init__(self, group: Iterable[EntryPoint] | None = None) -> None:
        self.records: list[PluginRecord] = []
        self._offers: dict[tuple[str, str], tuple[Spec, PluginRecord]] = {}
        points = entry_points(group="emssd") if group is None else group
        for point in sorted(points, key=lambda point: point.name):
            distribution = (point.dist and point.dist.name) or "?"  # metadata may be missing, or tell neither
            version = (point.dist and point.dist.version) or "?"
            try:
                offers = self._load(point, distribution, version)
            except (Exception, SystemExit) as error:  # whatever a stranger's module does must not take the others down
                reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
                self._report(PluginRecord("plugin", point.name, distribution, version, "failed", reason))
            else:
                self._offers |= offers
                self.records.extend(record for _, record in offers.values())

    def names(self, kind: str) -> list[str]:
        """Names of what is offered, sorted."""
        return sorted(name for known, name in self._offers if known == kind)

    def specs(self, kind: str) -> list[Spec]:
        """What is offered, sorted by name."""
        return [self._offers[kind, name][0] for name in self.names(kind)]

    def source(self, kind: str, name: str) -> str:
        """Distribution and version behind a name."""
        record = self._offers[kind, name][1]
        return f"{record.distribution} {record.version}"

    def find(self, kind: str, name: str, presets: Iterable[str] = ()) -> Spec:
        """What is offered as `name`.

        Args:
            presets: names of presets that the caller knows beside the plugins, for the message.

        Raises:
            PluginError: no such name (with what there is), its plugin failed, or it cannot run here.
        """
        if (kind, name) not in self._offers:
            there = sorted({*self.names(kind), *presets})
            guess = did_you_mean(name, there) or ";"
            message = f"unknown {kind} {name!r}{guess} choose one of {', '.join(there)}"
            failed = (record for record in self.records if record.state == "failed")
            raise PluginError(". ".join([message, *map(_failure, failed)]))
        spec, record = self._offers[kind, name]
        if record.state == "unavailable":
            raise PluginError(f"{kind} {name!r} is not available: {record.reason}.")
        return spec

    def withdraw(self, kind: str, name: str, reason: str) -> None:
        """Offer `name` no longer, because of a fault found after loading; reported as if loading had failed."""
        _, record = self._offers.pop((kind, name))
        self.records.remove(record)
        self._report(dataclasses.replace(record, state="failed", reason=reason))

    def resolve(self, kind: str, choice: Any) -> tuple[Spec, Any]:
        """The spec and config of `choice`: a name, or an instance of a plugin's config dataclass.

        Raises:
            PluginError: see `find`. ConfigError: `choice` is neither.
        """
        if isinstance(choice, str):
            spec = self.find(kind, choice)
            return spec, spec.config()
        for spec in self.specs(kind):
            if isinstance(choice, spec.config):
                return self.find(kind, spec.name), choice
        raise ConfigError(
            f"{kind} is a {type(choice).__name__}; give a name ({', '.join(self.names(kind))}) or a plugin's config"
        )

    def _report(self, record: PluginRecord) -> None:
        self.records.append(record)
        if os.environ.get("EMSSD_STRICT") == "1":
            raise PluginError(_failure(record))
        warnings.warn(_failure(record), PluginWarning, stacklevel=2)

    def _load(
        self, point: EntryPoint, distribution: str, version: str
    ) -> dict[tuple[str, str], tuple[Spec, PluginRecord]]:
        """All that one entry point offers; all or nothing."""
        if reason := unmet_requirement(distribution):
            raise PluginError(reason)
        manager = pluggy.PluginManager("emssd")
        manager.add_hookspecs(hookspecs)
        manager.register(point.load(), name=point.name)
        try:
            manager.check_pending()  # a misspelt hook is an error, not silence
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{error}; the hooks are {', '.join(KINDS.values())}") from None
        offers: dict[tuple[str, str], tuple[Spec, PluginRecord]] = {}
        for kind, hook in KINDS.items():
            for spec in _specs(getattr(manager.hook, hook)(), hook):
                if known := offers.get((kind, spec.name)) or self._offers.get((kind, spec.name)):
                    raise PluginError(f"{kind} {spec.name!r} is already offered by {known[1].distribution}")
                _check_config(spec.config, f"{kind} {spec.name!r}")
                reason = spec.unavailable() if spec.unavailable else None
                state = "unavailable" if reason else "ready"
                record = PluginRecord(kind, spec.name, distribution, version, state, reason or "")
                offers[kind, spec.name] = spec, record
        if not offers:
            raise PluginError(f"none of the hooks {', '.join(KINDS.values())} returns anything")
        return offers


def _specs(results: list[Any], hook: str) -> list[Spec]:
    """What a hook returned, as one list."""
    for result in results:
        if not isinstance(result, list) or not all(isinstance(spec, Spec) for spec in result):
            raise PluginError(f"hook {hook} returned {result!r}, not a list of emssd.hookspecs.Spec")
    return [spec for result in results for spec in result]


def _check_config(config: Any, owner: str) -> None:
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise PluginError(f"the config of {owner} is {config!r}, not a dataclass")
    if config.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # not in typeshed
        raise PluginError(f"the config of {owner} is a frozen dataclass, whose options could not be set")
    if "name" in {field.name for field in dataclasses.fields(config)}:
        raise PluginError(f"the config of {owner} has a field 'name', which is taken by the plugin's own name")


def _failure(record: PluginRecord) -> str:
    return f"{record.kind} {record.name!r} of {record.distribution} {record.version} is not loaded: {record.reason}"
