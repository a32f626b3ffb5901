"""The embedded demo: a tiny target, a tinier draft model, a trained head, and prompts from Python's documentation.

Example:
    >>> from emssd import demo
    >>> demo.prompts(limit=2)[0].prompt_id  # doctest: +SKIP
    'integers-0-restate'
    >>> demo.model_path("draft").name
    'draft'
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from emssd.errors import ConfigError

if TYPE_CHECKING:
    from emssd.data.prompts import Prompt

__all__ = ["model_path", "prompts"]

_MODELS = ("target", "draft", "eagle3")


def model_path(name: str) -> Path:
    """Folder of the embedded model `name`, for the ``from_pretrained`` of model and tokenizer.

    Args:
        name: ``target``; ``draft``, which shares the target's tokenizer; or ``eagle3``, a trained head for the target,
            which has none and is loaded by `drafter=eagle3`.

    Raises:
        ConfigError: no such model, or its files were not installed.
    """
    if name not in _MODELS:
        raise ConfigError(f"there is no embedded model {name!r}; choose one of {', '.join(_MODELS)}")
    path = Path(__file__).parent / "weights" / name
    if not (path / "model.safetensors").is_file():
        raise ConfigError(
            f"the embedded model {name!r} is missing from this installation ({path}); reinstall emssd, "
            f"or train it anew in a checkout: python -m benchmarks.demo --out {path.parent}"
        )
    return path


def prompts(limit: int | None = None) -> list[Prompt]:
    """Prompts that the embedded target knows: passages to restate and passages to continue, eight by eight.

    They are made from the documentation that the running Python carries, so another Python version has
    slightly different ones; with one version they and their order are always the same.

    Args:
        limit: only the first so many; all of them (about 70) by default.

    Raises:
        ConfigError: a negative limit.
        PromptError: this Python was installed without its documentation.
    """
    from emssd.data.demo.corpus import documents, make_prompts

    if limit is not None and limit < 0:
        raise ConfigError(f"limit is {limit}; it must be zero or more, or None for all prompts")
    return make_prompts(documents())[:limit]
