"""The four hooks of a plugin, each with its own record. All run once, at start-up; none is in the decode loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:  # a plugin module is imported at every start, so nothing here brings torch
    from emssd.attention import AttentionBackend
    from emssd.data import FailedPrompt, Prompt
    from emssd.drafting import BudgetPolicy, Drafter, DrafterContext

__all__ = [
    "KINDS",
    "BackendSpec",
    "BudgetSpec",
    "DrafterSpec",
    "PromptSourceSpec",
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
    """The fields that the records of all hooks have.

    Attributes:
        name: what the user selects, as in ``drafter=NAME``.
        config: a dataclass whose fields, all with defaults (or ``MISSING``), are the options ``drafter.FIELD=…``. An
            integer field ``seed`` is noted in the rows of experiments.
        build: makes what is offered from an instance of `config`; may import what is heavy.
        unavailable: ``unavailable()`` gives the reason why it cannot run on this machine, or ``None``.
    """

    name: str
    config: type
    build: Callable[..., Any]
    unavailable: Callable[[], str | None] | None = None


@dataclass(frozen=True, slots=True)
class DrafterSpec(Spec):
    """A drafter that a plugin offers, as ``drafter=NAME``.

    Attributes:
        build: ``build(config, context)`` gives a new drafter, or a list of new ones that are asked in turn.
        reads: names of the formats of `emssd.drafters.heads.Format` that its files may have.
    """

    build: Callable[[Any, DrafterContext], Drafter | list[Drafter]]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendSpec(Spec):
    """An attention backend that a plugin offers, as ``backend=NAME``.

    Attributes:
        build: ``build(config)`` gives a new backend that is not allocated yet.
        batch_invariant: where its attention gives a row the same bits in any batch, in a few words; empty if nowhere.
    """

    build: Callable[[Any], AttentionBackend]
    batch_invariant: str = ""


@dataclass(frozen=True, slots=True)
class BudgetSpec(Spec):
    """A budget policy that a plugin offers, as ``budget=NAME``.

    Attributes:
        build: ``build(config)`` gives a new policy.
    """

    build: Callable[[Any], BudgetPolicy]


@dataclass(frozen=True, slots=True)
class PromptSourceSpec(Spec):
    """A source of prompts that a plugin offers, as ``data=NAME``.

    Attributes:
        build: ``build(config)`` gives the prompts.
    """

    build: Callable[[Any], Iterable[Prompt | FailedPrompt]]


KINDS: dict[str, tuple[str, type[Spec]]] = {
    "drafter": ("emssd_drafters", DrafterSpec),
    "backend": ("emssd_attention_backends", BackendSpec),
    "budget": ("emssd_budget_policies", BudgetSpec),
    "data": ("emssd_prompt_sources", PromptSourceSpec),
}
"""The kinds of plugin, as the user chooses them: the hook, and its record."""


@hookspec
def emssd_drafters() -> list[DrafterSpec]:  # type: ignore[empty-body]  # pluggy calls implementations only
    """Drafters that this plugin offers."""


@hookspec
def emssd_attention_backends() -> list[BackendSpec]:  # type: ignore[empty-body]  # as above
    """Attention backends that this plugin offers."""


@hookspec
def emssd_budget_policies() -> list[BudgetSpec]:  # type: ignore[empty-body]  # as above
    """Policies of how many tokens to draft that this plugin offers."""


@hookspec
def emssd_prompt_sources() -> list[PromptSourceSpec]:  # type: ignore[empty-body]  # as above
    """Prompt sources that this plugin offers."""
