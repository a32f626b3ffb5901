"""The command ``emssd-lm-eval``: ``lm_eval``, which knows no models of other packages, with ``emssd`` registered."""

from __future__ import annotations

from importlib import import_module

from emssd.errors import exit_on_error
from emssd.integrations.installed import check_installed

__all__ = ["main"]


def main() -> None:
    """Entry point of ``emssd-lm-eval``; takes what ``lm_eval`` takes. Exits with 2 for an error of the user's."""
    with exit_on_error("emssd-lm-eval"):
        check_installed("lm-eval")
        import_module("emssd.integrations.lm_eval")
        import_module("lm_eval.__main__").cli_evaluate()
