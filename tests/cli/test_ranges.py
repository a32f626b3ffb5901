"""The types of options: each bound and choice of each option class is enforced and named, whoever makes the options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from emssd_heads.training.options import Eagle3Options, MedusaOptions, PardOptions, TrainOptions

from emssd.cli.config import RunConfig
from emssd.data.model_options import ModelOptions
from emssd.errors import ConfigError
from emssd.errors.ranges import check_options
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped

REGISTRY = Registry()
PLUGINS = [(kind, spec.config) for kind in KINDS for spec in REGISTRY.specs(kind)]
TRAINED = (Eagle3Options, MedusaOptions, PardOptions)
ALL = [*PLUGINS, ("", RunConfig), ("model", ModelOptions), *(("--", options) for options in TRAINED)]
FOR_TRAINING = {"model": "demo", "data": "f.jsonl", "output": "out"}
ANY_NUMBER = {"seed", "bits", "max_model_len", "temperature", "hidden_layers"}
"""Options that take any number, some, or those that a model has."""


def parts(kind: Any) -> list[Any]:
    """The types of the values that an option of this type holds, in lists too."""
    inner = () if get_origin(kind) is Annotated else get_args(kind)
    return [part for option in inner for part in parts(option)] if inner else [kind]


def fields_of(options: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(options, include_extras=True)
    return ((field.name, hints[field.name]) for field in dataclasses.fields(options))


def made(options: type, **values: Any) -> Any:
    needed = FOR_TRAINING | ({"draft": "demo"} if options is PardOptions else {})
    return options(**needed | values if issubclass(options, TrainOptions) else values)


def refusal(group: str, options: type, name: str, value: Any) -> str:
    """The message on such a value, after the option and the value; the same from Python as from the command line."""
    with pytest.raises(ConfigError) as raised:
        check_options(made(options, **{name: value}), group)
    option = f"--{name.replace('_', '-')}" if group == "--" else f"{group}.{name}".lstrip(".")
    assert str(raised.value).startswith(f"{option} is {value!r}")
    if group in KINDS:
        for make in (
            lambda: REGISTRY.resolve(group, made(options, **{name: value})),
            lambda: RunConfig(**{group: made(options, **{name: value})}),
        ):
            with pytest.raises(ConfigError) as again:
                make()
            assert str(again.value) == str(raised.value)
    return str(raised.value).removeprefix(f"{option} is {value!r}")


@looped("group, options", ALL)
def test_every_bound_is_enforced_and_named_and_every_number_has_one(group: str, options: type) -> None:
    for name, kind in fields_of(options):
        assert not {int, float} & {*parts(kind)} or name in ANY_NUMBER, (options, name)
        for part in parts(kind):
            if get_origin(part) is not Annotated:
                continue
            meta, depth = part.__metadata__[0], str(kind).count("list[")
            for sign, step, words in (("ge", -1, "least"), ("gt", 0, "above"), ("le", 1, "most"), ("lt", 0, "below")):
                if (limit := getattr(meta, sign)) is not None:
                    wrong: Any = limit + step
                    for _ in range(depth):
                        wrong = [wrong]
                    assert words in refusal(group, options, name, wrong)
            if not depth:
                for value in ("x", True, *([None] if type(None) not in get_args(kind) else [])):
                    assert "; it must be a " in refusal(group, options, name, value)
                assert "must be a finite number" in refusal(group, options, name, math.nan)


@looped("group, options", ALL)
def test_a_choice_is_one_of_the_enumeration_and_may_be_a_text(group: str, options: type) -> None:
    for name, kind in fields_of(options):
        for part in parts(kind):
            if isinstance(part, type) and issubclass(part, Enum):
                names = ", ".join(str(member.value) for member in part)
                assert refusal(group, options, name, "xyz") == f"; choose one of {names}"
                for member in part:
                    check_options(chosen := made(options, **{name: member.value}), group)
                    assert getattr(chosen, name) is member


def test_values_in_lists_and_groups_are_held_to_the_same() -> None:
    for values, problem in (
        ({"model": ModelOptions(architecture={"a": [1, {"b": math.inf}]})}, r"model\.architecture\.a\[1\]\.b is inf; "),
        ({"stop": [["x"]]}, r"stop is \[\['x'\]\]; each item must be a text"),
        ({"stop": "x"}, r"stop is 'x'; it must be a list"),
        ({"batch_size": 10**30}, "batch_size is a number of 31 digits; it must be below 2"),
    ):
        with pytest.raises(ConfigError, match=f"^{problem}"):
            RunConfig(**values)
    assert RunConfig(output_dir=Path("a") / "b").output_dir == "a/b"
