"""Ranges of options: each bound of each option class is enforced and named, whoever makes the options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from msgspec import Meta

from emssd.cli.config import ModelConfig, RunConfig
from emssd.errors import ConfigError
from emssd.errors.ranges import check_options, range_of
from emssd.plugins.registry import KINDS, Registry
from emssd_train.options import Eagle3Options, MedusaOptions, PardOptions, TrainOptions
from tests.support.tiers import looped

REGISTRY = Registry()
PLUGINS = [(kind, spec.config) for kind in KINDS for spec in REGISTRY.specs(kind)]
FOR_TRAINING = {"model": "demo", "data": "f.jsonl", "output": "out"}
ANY_NUMBER = {
    "seed",
    "bits",
    "query_tile",
    "max_model_len",
    "temperature",
    "hidden_layers",
}  # choices, or checked beside a model


def numbers(kind: Any) -> list[Any]:
    """The types of a number that an option of this type holds, in lists too."""
    parts = [kind] if get_origin(kind) is Annotated or not get_args(kind) else get_args(kind)
    return [part for each in parts for part in ([each] if each is kind else numbers(each))]


def bounded(options: type) -> Iterator[tuple[str, Any, Meta]]:
    """Name, type and bounds of each option that has some itself."""
    for name, kind in get_type_hints(options, include_extras=True).items():
        metas = [part.__metadata__[0] for part in numbers(kind) if get_origin(part) is Annotated]
        if metas and range_of(kind):
            yield name, kind, metas[0]


def beyond(meta: Meta) -> Iterator[tuple[float, float]]:
    """Each bound, with a value that is just outside of it."""
    for bound, value in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
        if (limit := getattr(meta, bound)) is not None:
            yield limit, limit + value


def made(options: type, **values: Any) -> Any:
    needed = FOR_TRAINING | ({"draft": "demo"} if options is PardOptions else {})
    return options(**needed | values if issubclass(options, TrainOptions) else values)


ALL = [*PLUGINS, ("", RunConfig), *(("--", options) for options in (Eagle3Options, MedusaOptions, PardOptions))]
CASES = [(group, options, name, kind, limit, value) for group, options in ALL
         for name, kind, meta in bounded(options) for limit, value in beyond(meta)]  # fmt: skip


def name_of(group: str, name: str) -> str:
    return f"--{name.replace('_', '-')}" if group == "--" else f"{group}.{name}".lstrip(".")


@looped("group, options, name, kind, limit, value", CASES)
def test_every_bound_is_enforced_and_named(
    group: str, options: type, name: str, kind: Any, limit: float, value: float
) -> None:
    with pytest.raises(ConfigError) as raised:
        REGISTRY.resolve(group, made(options, **{name: value}))
    assert str(raised.value).startswith(f"{name_of(group, name)} is {value}; it must be ")
    assert str(limit) in str(raised.value).partition("it must be ")[2]
    assert ("null" in str(raised.value)) == (type(None) in get_args(kind))
    if group in KINDS:  # as the command line makes them
        with pytest.raises(ConfigError, match=rf"^{group}\.{name} is "):
            RunConfig(**{group: made(options, **{name: value})})


@looped("group, options, name, kind", {case[:4] for case in CASES})
def test_what_is_no_number_is_refused_and_what_may_be_left_out_is_not(
    group: str, options: type, name: str, kind: Any
) -> None:
    for value in ("x", True, math.nan, *([None] if type(None) not in get_args(kind) else [])):
        with pytest.raises(ConfigError, match=rf"^{name_of(group, name)} is .*; it must be a .*number"):
            check_options(made(options, **{name: value}), group.strip("-"))
    made(options)


@looped("options", [RunConfig, ModelConfig, Eagle3Options, MedusaOptions, *(config for _, config in PLUGINS)])
def test_every_number_has_a_range(options: type) -> None:
    for name, kind in get_type_hints(options, include_extras=True).items():
        assert not {int, float} & {*numbers(kind)} or name in ANY_NUMBER, (options, name)


@looped("group, options", PLUGINS)
def test_a_choice_is_one_of_the_enumeration_and_may_be_a_text(group: str, options: type) -> None:
    for name, kind in get_type_hints(options).items():
        if isinstance(kind, type) and issubclass(kind, Enum):
            for member in kind:
                _, chosen = REGISTRY.resolve(group, made(options, **{name: member.value}))
                assert getattr(chosen, name) is member
            names = ", ".join(str(member.value) for member in kind)
            with pytest.raises(ConfigError, match=rf"^{group}\.{name} is 'xyz'; choose one of {names}$"):
                REGISTRY.resolve(group, made(options, **{name: "xyz"}))


def test_values_in_lists_and_groups_are_held_to_the_same() -> None:
    drafter = {name: REGISTRY.find("drafter", name).config for name in ("draft_model", "replay")}
    for values, problem in (
        ({"drafter": drafter["draft_model"](expansion=[2, 0])}, r"drafter\.expansion\[1\] is 0; "),
        ({"drafter": drafter["replay"](chances=[[0.5], [2.0]])}, r"drafter\.chances\[1\]\[0\] is 2\.0; "),
        ({"model": ModelConfig(architecture={"a": [1, {"b": math.inf}]})}, r"model\.architecture\.a\[1\]\.b is inf; "),
        ({"stop": [["x"]]}, r"stop\[0\] is \['x'\]; it must be one value of type str"),
        ({"batch_size": 10**30}, "batch_size is a number of 31 digits; it must be below 2"),
    ):
        with pytest.raises(ConfigError, match=f"^{problem}"):
            RunConfig(**values)
