"""The lab: experiments, reports of their rows, and drafts that are replayed."""

from __future__ import annotations

from importlib import import_module

from emssd.errors import ConfigError

__all__ = ["check_extra"]


def check_extra(user: str, *libraries: str) -> None:
    """Raises ConfigError: one of the `libraries` of the extra `lab` is not installed, and `user` needs it."""
    for library in libraries:
        try:
            import_module(library)
        except ImportError as error:
            raise ConfigError(f'{user} needs {library} ({error}); install it: pip install "emssd[lab]"') from error
