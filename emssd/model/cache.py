"""Models stay loaded between runs that follow one another in one process."""

from __future__ import annotations

import gc
from typing import Any

from emssd.model.loading import load_model
from emssd.model.target import TargetModel

__all__ = ["ModelCache"]


class ModelCache:
    """Loads what is asked for once, in the place of `emssd.model.load_model`, as long as one target is in use.

    With the next target, the models of the one before are dropped; so a sweep that alternates targets loads one for
    each run (see *Several models* in ``docs/experiments.md``).
    """

    def __init__(self) -> None:
        self._target: tuple[Any, ...] | None = None
        self._models: dict[tuple[Any, ...], tuple[TargetModel, Any]] = {}

    def target(self, path: str, **options: Any) -> tuple[TargetModel, Any]:
        """The target of a run; options as of `load_model`."""
        key = _key(path, options)
        if key != self._target:
            self._models.clear()
            gc.collect()  # models hold themselves, and there is to be room for the next one
            self._target = key
        return self.draft(path, **options)

    def draft(self, path: str, **options: Any) -> tuple[TargetModel, Any]:
        """A further model, for a drafter."""
        key = _key(path, options)
        if key not in self._models:
            self._models[key] = load_model(path, **options)
        return self._models[key]


def _key(path: str, options: dict[str, Any]) -> tuple[Any, ...]:
    return path, *sorted((name, repr(value)) for name, value in options.items())
