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
from emssd.errors import ConfigError, PluginError
from emssd.hookspecs import Spec

__all__ = ["KINDS", "PluginRecord", "PluginWarning", "Registry"]

KINDS = {
    "drafter": "emssd_drafters",
    "backend": "emssd_attention_backends",
    "data": "emssd_prompt_sources",
}


class PluginWarning(UserWarning):
    """A plugin could not be used; the others are not affected. An error with ``EMSSD_STRICT=1``."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one entry point, or of one thing it offers.

    Attributes:
        kind: ``drafter``, ``backend``, ``data``, or ``plugin`` where loading failed before anything was offered.
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
        self._specs: dict[tuple[str, str], Spec] = {}
        self._sources: dict[tuple[str, str], str] = {}
        points = entry_points(group="emssd") if group is None else group
        for point in sorted(points, key=lambda point: point.name):
            distribution = point.dist.name if point.dist else "?"
            version = point.dist.version if point.dist else "?"
            try:
                self._load(point, distribution, version)
            except Exception as error:  # whatever a stranger's module raises must not take the others down
                reason = f"{type(error).__name__}: {error}"
                self.records.append(PluginRecord("plugin", point.name, distribution, version, "failed", reason))
                message = f"plugin {point.name!r} of {distribution} {version} is not loaded: {reason}"
                if os.environ.get("EMSSD_STRICT") == "1":
                    raise PluginError(message) from error
                warnings.warn(message, PluginWarning, stacklevel=2)

    def names(self, kind: str) -> list[str]:
        """Names of what is offered, sorted."""
        return sorted(name for known, name in self._specs if known == kind)

    def specs(self, kind: str) -> list[Spec]:
        """What is offered, sorted by name."""
        return [self._specs[kind, name] for name in self.names(kind)]

    def source(self, kind: str, name: str) -> str:
        """Distribution and version behind a name."""
        return self._sources[kind, name]

    def find(self, kind: str, name: str) -> Spec:
        """What is offered as `name`.

        Raises:
            PluginError: no such name (with what there is), its plugin failed, or it cannot run here.
        """
        spec = self._specs.get((kind, name))
        if spec is None:
            message = f"unknown {kind} {name!r}; choose one of {', '.join(self.names(kind))}"
            failed = [record for record in self.records if record.state == "failed"]
            for record in failed:
                message += (
                    f". Plugin {record.name!r} ({record.distribution} {record.version}) failed to load: {record.reason}"
                )
            raise PluginError(message)
        reason = spec.unavailable() if spec.unavailable else None
        if reason:
            raise PluginError(f"{kind} {name!r} is not available: {reason}.")
        return spec

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

    def _load(self, point: EntryPoint, distribution: str, version: str) -> None:
        manager = pluggy.PluginManager("emssd")
        manager.add_hookspecs(hookspecs)
        manager.register(point.load(), name=point.name)
        manager.check_pending()  # a misspelt hook is an error, not silence
        offered: list[tuple[str, Spec]] = []
        for kind, hook in KINDS.items():
            for specs in getattr(manager.hook, hook)():
                offered.extend((kind, spec) for spec in specs)
        if not offered:
            raise PluginError(f"it implements none of the hooks {', '.join(KINDS.values())}")
        for kind, spec in offered:
            self._check(kind, spec)
        for kind, spec in offered:
            self._specs[kind, spec.name] = spec
            self._sources[kind, spec.name] = f"{distribution} {version}"
            reason = spec.unavailable() if spec.unavailable else None
            state = "unavailable" if reason else "ready"
            self.records.append(PluginRecord(kind, spec.name, distribution, version, state, reason or ""))

    def _check(self, kind: str, spec: Any) -> None:
        if not isinstance(spec, Spec):
            raise PluginError(f"hook {KINDS[kind]} returned {spec!r}, not a list of emssd.hookspecs.Spec")
        if not (isinstance(spec.config, type) and dataclasses.is_dataclass(spec.config)):
            raise PluginError(f"the config of {kind} {spec.name!r} is not a dataclass")
        if (kind, spec.name) in self._specs:
            raise PluginError(f"{kind} {spec.name!r} is already offered by {self._sources[kind, spec.name]}")
