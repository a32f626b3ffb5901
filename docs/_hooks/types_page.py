"""Writes the page of the classes that plugins see, from their docstrings and annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from emssd import attention, drafting, plugins, sequences
from emssd.cli import docstrings
from emssd.data import prompts
from emssd.metrics import stats

__all__ = ["CLASSES", "page"]

CLASSES: dict[str, list[type]] = {
    "Offering": [plugins.Spec],
    "Drafting": [drafting.Drafter, drafting.Draft, drafting.Outcome, drafting.DrafterContext],
    "What is being generated": [sequences.Batch, sequences.Sequence, sequences.Request],
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
    "Budgets": [drafting.BudgetPolicy, stats.StepStats],
    "Prompts": [prompts.Prompt, prompts.FailedPrompt],
}

_HEAD = """# Types that plugins see

What the interfaces hand to a plugin, and what they want back. `B` is the number of rows of a step, `nnz` the number of
its tokens; an `indptr` has a leading zero and B + 1 entries. A *value* is frozen: read it, make a new one, change none.

This page is made from the docstrings.
"""


def page() -> str:
    """The Markdown of the page."""
    lines = [_HEAD]
    for title, kinds in CLASSES.items():
        lines += [f"## {title}", ""]
        for kind in kinds:
            lines += [f"### {kind.__name__}", "", f"*{_what(kind)} of `{kind.__module__}`.*", ""]
            lines += [docstrings.introduction(kind), "", *_fields(kind), *_methods(kind)]
    return "\n".join(lines)


def _what(kind: type) -> str:
    if inspect.isabstract(kind):
        return "Interface"
    parameters = getattr(kind, "__dataclass_params__", None)
    return "Value" if parameters is not None and parameters.frozen else "Class"


def _fields(kind: type) -> Iterator[str]:
    """What an instance has: documented attributes, further fields of a dataclass, properties."""
    texts = docstrings.attributes(kind) | (docstrings.entries(docstrings.sections(kind).get("Args", "")))
    annotations = inspect.get_annotations(kind)
    names = [*annotations] if is_dataclass(kind) else [name for name in annotations if name in texts]
    for name in names:
        yield f"`{name}`{{ #{kind.__name__}-{name} }} · `{annotations[name]}`"
        yield f":   {texts.get(name, '–')}\n"
    for name, member in vars(kind).items():
        if isinstance(member, property):
            assert member.fget is not None
            yield f"`{name}`{{ #{kind.__name__}-{name} }} · `{member.fget.__annotations__['return']}`"
            yield f":   {docstrings.introduction(member)}\n"


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
