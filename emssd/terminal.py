"""What the commands print to."""

from __future__ import annotations

from typing import Any

from rich.console import Console

__all__ = ["plain_console"]


def plain_console(**options: Any) -> Console:
    """A console that prints words as they stand: paths, ids and options may look like Rich's markup or its emoji.

    Args:
        options: of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, **options)
