"""The four hooks of a plugin, and the record they return. All run once, at start-up; none is in the decode loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

__all__ = [
    "Spec",
    "emssd_attention_backends",
    "emssd_budget_policies",
    "emssd_drafters",
    "emssd_prompt_sources",
    "hookimpl",
]

hookspec = pluggy.HookspecMarker("emssd")
hookimpl = pluggy.HookimplMarker("emssd")


@dataclass(frozen=True, slots=True)
class Spec:
    """One thing that a plugin offers.

    Attributes:
        name: what the user selects, as in ``drafter=NAME``.
        config: a dataclass whose fields, all with defaults (or ``MISSING``), are the options ``drafter.FIELD=…``.
        build: makes it. A drafter: ``build(config, context: DrafterContext) -> Drafter``, or a list of
            drafters that are asked in turn. An attention backend:
            ``build(config) -> AttentionBackend``. A budget policy: ``build(config) -> BudgetPolicy``. A prompt source:
            ``build(config) -> Iterable[Prompt | FailedPrompt]``.
        unavailable: ``unavailable()`` gives the reason why it cannot run on this machine, or ``None``.
    """

    name: str
    config: type
    build: Callable[..., Any]
    unavailable: Callable[[], str | None] | None = None


@hookspec
def emssd_drafters() -> list[Spec]:  # type: ignore[empty-body]  # pluggy calls implementations only
    """Drafters that this plugin offers."""


@hookspec
def emssd_attention_backends() -> list[Spec]:  # type: ignore[empty-body]  # as above
    """Attention backends that this plugin offers."""


@hookspec
def emssd_budget_policies() -> list[Spec]:  # type: ignore[empty-body]  # as above
    """Policies of how many tokens to draft that this plugin offers."""


@hookspec
def emssd_prompt_sources() -> list[Spec]:  # type: ignore[empty-body]  # as above
    """Prompt sources that this plugin offers."""
