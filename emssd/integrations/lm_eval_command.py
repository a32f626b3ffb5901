"""The command ``emssd-lm-eval``: ``lm_eval``, which knows no models of other packages, with ``emssd`` registered."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from emssd.errors import ConfigError, exit_on_error

__all__ = ["main"]


def main() -> None:
    """Entry point of ``emssd-lm-eval``; takes what ``lm_eval`` takes. Exits with 2 for an error of the user's."""
    with exit_on_error("emssd-lm-eval"):
        if find_spec("lm_eval") is None:
            raise ConfigError("this needs the evaluation harness: pip install 'emssd[lm_eval]'")
        import_module("emssd.integrations.lm_eval")
        import_module("lm_eval.__main__").cli_evaluate()
