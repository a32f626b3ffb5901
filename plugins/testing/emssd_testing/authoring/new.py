"""``emssd-plugins new``: writes a complete distribution from the templates that ship beside this file."""

from __future__ import annotations

import keyword
import re
from importlib.metadata import entry_points, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from string import Template

from emssd.errors import ConfigError, OutputError

__all__ = ["new_plugin"]

_SUFFIX = ".template"
_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")


def new_plugin(kind: str, name: str, folder: Path | None = None) -> Path:
    """Write a plugin of this `kind`, drafter or budget, that works as it is. Returns its folder."""
    _check_name(kind, name)
    distribution = f"emssd-{name.replace('_', '-')}"
    folder = folder or Path(distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is there already, and nothing in it is overwritten; give another with --folder")
    words = {
        "kind": kind,
        "name": name,
        "package": f"emssd_{name}",
        "distribution": distribution,
        "title": "".join(part.capitalize() for part in name.split("_")),
        "version": version("emssd"),
    }
    try:
        for template in ("common", kind):
            _write(files("emssd_testing.authoring") / "templates" / template, folder, words)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    return folder


def _check_name(kind: str, name: str) -> None:
    package = f"emssd_{name}"
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a {kind}: it becomes a Python package and an option, so take lower-case letters, "
            f"digits and underscores, begin with a letter, and take no word of Python's own, as in my_{kind}"
        )
    taken = [point for point in entry_points(group="emssd") if point.name == name]
    if taken or find_spec(package) is not None:
        owner = f"{taken[0].dist.name} {taken[0].dist.version}" if taken and taken[0].dist else f"a package {package}"
        raise ConfigError(f"{name!r} is taken by {owner}, which is installed here; take another name")


def _write(template: Traversable, folder: Path, words: dict[str, str]) -> None:
    """Fill in the files of `template` and write them, with their names filled in too."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in template.iterdir():
        if entry.is_dir():
            _write(entry, folder / _filled(entry.name, words), words)
        elif entry.name.endswith(_SUFFIX):
            text = Template(entry.read_text(encoding="utf-8")).substitute(words)
            name = _filled(entry.name.removesuffix(_SUFFIX), words)
            (folder / name).write_text(text, encoding="utf-8")


def _filled(name: str, words: dict[str, str]) -> str:
    """``package`` and ``test_name.py`` stand for names that hold that of the plugin."""
    return {"package": words["package"], "test_name.py": f"test_{words['name']}.py"}.get(name, name)
