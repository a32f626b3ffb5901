"""Writes the page of the classes that plugins see, from their docstrings and annotations."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import emssd_heads as heads

from emssd import attention, data, draft_models, drafting, hooks, model, sequences
from emssd.cli import option_texts as docstrings

__all__ = ["CLASSES", "MODULES", "PARTS", "page", "public", "said"]

MODULES = (
    "emssd",
    "emssd.hooks",
    "emssd.drafting",
    "emssd.draft_models",
    "emssd_heads",
    "emssd.attention",
    "emssd.sequences",
    "emssd.model",
    "emssd.data",
    "emssd.errors",
    "emssd_testing",
    "emssd.native",
    "emssd.errors.ranges",
    "emssd.cli.terminal",
)
PARTS: dict[str, tuple[str, ...]] = {
    "emssd.errors": (
        "ConfigError",
        "EmssdError",
        "OutOfMemoryError",
        "OutputError",
        "PluginError",
        "PromptError",
        "UnsupportedModelError",
    ),
    "emssd.sequences": tuple(name for name in sequences.__all__ if name not in ("Generation", "StopStrings")),
    "emssd_testing": (
        "AttentionBackendConformance",
        "BudgetPolicyConformance",
        "DrafterConformance",
        "tiny_model",
    ),
    "emssd.model": tuple(name for name in model.__all__ if name != "load_model"),
    "emssd.native": ("load_kernels", "why_unavailable"),
    "emssd.cli.terminal": ("steady",),
}
"""Modules of which only some names are public."""

CLASSES: dict[str, list[type]] = {
    "Offering": [hooks.DrafterSpec, hooks.BackendSpec, hooks.BudgetSpec, hooks.PromptSourceSpec],
    "Drafting": [drafting.Drafter, drafting.Draft, drafting.Outcome, drafting.HiddenStates, drafting.DrafterContext],
    "What is being generated": [sequences.Batch, sequences.Row, sequences.Request],
    "Attention": [
        attention.AttentionBackend,
        attention.KVCacheSpec,
        attention.LayerSpec,
        attention.PackedInputs,
        attention.StepPlan,
        attention.Kept,
        attention.KVUsage,
        attention.PagedBackend,
        attention.PagedKernels,
    ],
    "Drafting with models and heads": [
        draft_models.LevelDrafter,
        draft_models.ModelDrafter,
        heads.StatesDrafter,
        draft_models.SlotDrafter,
        heads.PairedDrafter,
        heads.PairedHead,
        heads.HeadFiles,
        heads.Loaded,
        heads.TargetWeights,
    ],
    "Models": [model.ModelRunner, model.ModelOutput, model.BorrowedTarget],
    "Budgets": [
        drafting.BudgetPolicy,
        drafting.BudgetStep,
        drafting.DraftedNode,
        drafting.StepStats,
        drafting.StageStats,
    ],
    "Prompts": [data.Prompt, data.FailedPrompt],
}

_HEAD = """# Types that plugins see

What the interfaces hand to a plugin, and what they want back. `B` is the number of rows of a step, `nnz` the number of
its tokens; an `indptr` has a leading zero and B + 1 entries. A *value* is frozen: read it, make a new one, change none.

This page is made from the docstrings.

## Public modules

A plugin imports these names and no others; so do the plugins of this project. All else may change in any version. Names
with a link are the *interfaces*, described below. The others are *parts*, which spare a plugin some work
([decision 45](../decisions/0045-public-modules.md)).
"""


def page() -> str:
    """The Markdown of the page."""
    lines = [_HEAD, *_modules()]
    for title, kinds in CLASSES.items():
        lines += [f"## {title}", ""]
        for kind in kinds:
            lines += [f"### {kind.__name__}", "", f"*{_what(kind)} of `{_home(kind)}`.*", ""]
            lines += [docstrings.introduction(kind), "", *_fields(kind), *_methods(kind)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _modules() -> Iterator[str]:
    """The contents of each public module: a name, and the first sentence about it."""
    described = {kind.__name__ for kinds in CLASSES.values() for kind in kinds}
    for module in MODULES:
        yield f"- `{module}`: {_sentence(import_module(module))}"
        for name in public(module):
            link = f"[`{name}`](#{name.lower()})" if name in described else f"`{name}`"
            yield f"    - {link}: {said(getattr(import_module(module), name), name)}"
    yield ""


def public(module: str) -> list[str]:
    """The names that a public module lists."""
    return [name for name in PARTS.get(module, import_module(module).__all__) if not name.startswith("_")]


def said(value: object, name: str) -> str:
    """The first sentence about a name; that of an alias or a number is the string after its assignment."""
    is_alias = value is Any or not (inspect.isclass(value) or inspect.isfunction(value))
    if not is_alias or getattr(value, "__module__", "emssd") == "pluggy._hooks":
        return _sentence(value)
    for module in [each for key, each in sys.modules.items() if key.startswith(("emssd.", "emssd_"))]:
        if vars(module).get(name) is value and (path := getattr(module, "__file__", None)) is not None:
            body = ast.parse(Path(path).read_text(encoding="utf-8")).body
            for before, after in pairwise(body):
                is_it = isinstance(before, ast.Assign) and getattr(before.targets[0], "id", None) == name
                if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    return str(after.value.value).partition("\n")[0]
    return _sentence(value)


def _sentence(documented: object) -> str:
    return docstrings.introduction(documented).partition("\n")[0].rstrip(":")


def _home(kind: type) -> str:
    return next(module for module in MODULES if kind.__name__ in public(module))


def _what(kind: type) -> str:
    if inspect.isabstract(kind):
        return "Interface"
    parameters = getattr(kind, "__dataclass_params__", None)
    return "Value" if issubclass(kind, tuple) or (parameters is not None and parameters.frozen) else "Class"


def _fields(kind: type) -> Iterator[str]:
    """The fields of an instance: documented attributes, further fields of a dataclass, properties."""
    texts = docstrings.attributes(kind) | (docstrings.entries(docstrings.sections(kind).get("Args", "")))
    annotations = inspect.get_annotations(kind)
    if is_dataclass(kind):
        annotations = {field.name.removeprefix("_"): field.type for field in fields(kind)}  # a property may read one
    for name in [name for name in annotations if is_dataclass(kind) or name in texts]:
        annotation = getattr(annotations[name], "__forward_arg__", annotations[name])  # as a NamedTuple has them
        yield f"- `{name}` · `{annotation}`: {texts.get(name, '–')}"
    for name, member in vars(kind).items():
        if isinstance(member, property) and name not in annotations:
            assert member.fget is not None
            said = " ".join(docstrings.introduction(member).split())
            yield f"- `{name}` · `{member.fget.__annotations__['return']}`: {said}"
    yield ""


def _methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        function: Any = member.__func__ if isinstance(member, classmethod) else member
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield f"```python\n{_signature(name, function, isinstance(member, classmethod))}\n```\n"
        yield docstrings.introduction(function) + "\n"
        for title, body in docstrings.sections(function).items():
            rows = docstrings.entries(body)
            if rows and title != "Returns":
                yield f"{title}:\n"
                yield from (f"- `{name}`: {text}" for name, text in rows.items())
                yield ""
            else:
                yield f"{title}: {docstrings.markdown(' '.join(body.split()))}\n"


def _signature(name: str, function: Callable[..., Any], of_class: bool) -> str:
    """As in the source, in one line or one for each parameter."""
    signature = inspect.signature(function)
    parts = [
        parameter.name if parameter.annotation is parameter.empty else str(parameter)
        for parameter in signature.parameters.values()
    ]
    parts = [part.replace("'", "") for part in parts]
    end = f") -> {signature.return_annotation}".replace("'", "")
    abstract = "@abstractmethod\n" if getattr(function, "__isabstractmethod__", False) else ""
    head = ("@classmethod\n" if of_class else abstract) + f"def {name}("
    line = head + ", ".join(parts) + end
    return line if len(line.splitlines()[-1]) <= 76 else head + "".join(f"\n    {part}," for part in parts) + f"\n{end}"
