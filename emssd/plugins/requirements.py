"""Finds plugins whose distribution was made for another version of emssd than the one that is here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from emssd.errors.version import __version__

__all__ = ["unmet_requirement"]


def unmet_requirement(name: str) -> str | None:
    """The requirement of the distribution `name` that emssd does not meet, as a sentence; ``None`` if all is well.

    pip refuses such a pair when it installs; it comes about by ``--no-deps``, by copying, or by a later downgrade.
    """
    try:
        lines = distribution(name).requires or []
    except (PackageNotFoundError, ValueError):  # of a distribution whose metadata tells no name
        return None
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip complains of it; here only what concerns emssd matters
        if canonicalize_name(requirement.name) != "emssd" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            return (
                f"it needs emssd{requirement.specifier}, and this is emssd {__version__}; install a version of "
                f"{name} for emssd {__version__}, or another emssd"
            )
    return None
