"""The hooks of a plugin, each with its own record, and tests of what a plugin needs, offers and builds.

All hooks run once, at start-up; none is in the decode loop.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from emssd.errors import PluginError

if TYPE_CHECKING:  # a plugin module is imported at every start, so nothing here brings torch
    from emssd.attention import AttentionBackend
    from emssd.data import FailedPrompt, Prompt
    from emssd.drafting import BudgetPolicy, Drafter, DrafterContext
    from emssd.drafting.rule import VerificationRule

__all__ = ["HOOKS", "KINDS", "DrafterSpec", "Spec", "check_spec", "held", "specs_of", "unmet_requirement"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

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


Offer = TypeVar("Offer", bound=Spec)


@dataclass(frozen=True, slots=True)
class DrafterSpec(Spec):
    """A drafter that a plugin offers, as ``drafter=NAME``.

    Attributes:
        build: ``build(config, context)`` gives a new drafter, or a list of new ones that are asked in turn.
        reads: names of the formats of `emssd_heads.Format` that its files may have.
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

    With a field ``temperature`` of its `config`, it gives each prompt a temperature, and ``sampling.temperature`` is
    refused.

    Attributes:
        build: ``build(config)`` gives the prompts.
        answers_file: the file in ``output_dir`` that holds the lines of `write_answers`.
        write_answers: ``write_answers(answered, failed, model, load_tokenizer)`` gives the lines of a file of answers,
            once all rows are there: for pairs of a prompt and its rows of ``generations.jsonl``, for `FailedPrompt` of
            all others, and for ``model.path``. With it, ``on_error=auto`` skips prompts that cannot be used.
    """

    build: Callable[[Any], Iterable[Prompt | FailedPrompt]]
    answers_file: str = ""
    write_answers: Callable[..., Iterable[str]] | None = None


@dataclass(frozen=True, slots=True)
class RuleSpec(Spec):
    """A rule of verification that the plugin of this name offers, as ``sampling.method=NAME``. It has no options.

    Attributes:
        build: ``build(config)`` gives the rule.
    """

    build: Callable[[Any], VerificationRule]


KINDS: dict[str, tuple[str, type[Spec]]] = {
    "drafter": ("emssd_drafters", DrafterSpec),
    "backend": ("emssd_attention_backends", BackendSpec),
    "budget": ("emssd_budget_policies", BudgetSpec),
    "data": ("emssd_prompt_sources", PromptSourceSpec),
}
"""The kinds of plugin, as the user chooses them: the hook, and its record."""

HOOKS: dict[str, tuple[str, type[Spec]]] = {**KINDS, "rule": ("emssd_verification_rules", RuleSpec)}
"""The same with rules of verification, which `SamplingParams.method` chooses."""


def offering(*specs: Offer) -> Callable[[], list[Offer]]:
    """The hook of a plugin that offers `specs`, as ``emssd_drafters`` or another of the names below."""
    return hookimpl(lambda: [*specs])


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


@hookspec
def emssd_verification_rules() -> list[RuleSpec]:  # type: ignore[empty-body]  # as above
    """Rules of verification that this plugin offers."""


def unmet_requirement(name: str) -> str | None:
    """The requirement of the distribution `name` that emssd does not meet, as a sentence; ``None`` if all is well.

    pip refuses such a pair when it installs; it comes about by ``--no-deps``, by copying, or by a later downgrade.
    """
    try:
        lines = distribution(name).requires or []
    except (PackageNotFoundError, ValueError):  # of a distribution whose metadata tells no name
        return None
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip complains of it; here only what concerns emssd matters
        if canonicalize_name(requirement.name) != "emssd" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(version("emssd"), prereleases=True):
            return (
                f"it needs emssd{requirement.specifier}, and this is emssd {version('emssd')}; install a version of "
                f"{name} for emssd {version('emssd')}, or another emssd"
            )
    return None


def specs_of(result: Any, kind: str) -> list[Spec]:
    """The records that the hook of `kind` returned, which must be a list of its own."""
    hook, record = HOOKS[kind]
    if isinstance(result, list) and all(isinstance(spec, record) for spec in result):
        return result
    for other, stranger in HOOKS.values():
        if isinstance(result, list) and stranger is not record and any(isinstance(spec, stranger) for spec in result):
            name = stranger.__name__
            raise PluginError(f"hook {hook} returned a {name}, not a {record.__name__}; return a {name} from {other}")
    raise PluginError(f"hook {hook} returned {result!r}, not a list of emssd.hooks.{record.__name__}")


def check_spec(spec: Spec, kind: str) -> None:
    """Hold one offer of `kind` to its types: its name can be chosen, it can be called, and its options can be set."""
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
        raise PluginError(
            f"the name of a {kind} is {spec.name!r}; give a text of letters, digits, '_', '-' and '.' that begins "
            f"with a letter"
        )
    owner = f"{kind} {spec.name!r}"
    if not callable(spec.build):
        raise PluginError(f"the build of {owner} is {spec.build!r}, which cannot be called")
    if spec.unavailable is not None and not callable(spec.unavailable):
        raise PluginError(f"unavailable of {owner} is {spec.unavailable!r}, which cannot be called")
    if isinstance(spec, PromptSourceSpec) and callable(spec.write_answers) != bool(spec.answers_file):
        raise PluginError(
            f"{owner} has either write_answers or answers_file; give a function and a file's name, or none"
        )
    config = spec.config
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise PluginError(f"the config of {owner} is {config!r}, not a dataclass")
    if config.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # not in typeshed
        raise PluginError(f"the config of {owner} is a frozen dataclass, whose options could not be set")
    if "name" in {field.name for field in dataclasses.fields(config)}:
        raise PluginError(f"the config of {owner} has a field 'name', which is taken by the plugin's own name")


def held(made: Any, kind: str, owner: str) -> Any:
    """The object that `owner` built, tested against its interface; prompts as a list, so that all of them were made."""
    from emssd.attention import AttentionBackend  # here, because these bring torch
    from emssd.data import FailedPrompt, Prompt
    from emssd.drafting import BudgetPolicy, Drafter
    from emssd.drafting.rule import VerificationRule

    wanted: tuple[type, ...]
    wanted, described = {
        "drafter": ((Drafter,), "an emssd.drafting.Drafter, or a list of them"),
        "backend": ((AttentionBackend,), "an emssd.attention.AttentionBackend"),
        "budget": ((BudgetPolicy,), "an emssd.drafting.BudgetPolicy"),
        "data": ((Prompt, FailedPrompt), "an iterable of emssd.data.Prompt"),
        "rule": ((VerificationRule,), "an emssd.drafting.rule.VerificationRule"),
    }[kind]
    parts = made if kind == "drafter" and isinstance(made, (list, tuple)) else [made]
    if kind == "data" and isinstance(made, Iterable):
        parts = made = list(made)
    elif not parts:
        raise PluginError(f"{owner} built nothing; its build must return {described}")
    if strangers := sorted({type(part).__name__ for part in parts if not isinstance(part, wanted)}):
        raise PluginError(f"{owner} built {', '.join(strangers)}; its build must return {described}")
    for part in parts if kind == "drafter" else ():
        most = part.num_speculative_tokens
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise PluginError(f"{owner} has num_speculative_tokens {most!r}; give a whole number, 0 or more")
    return made
