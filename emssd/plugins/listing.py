"""``emssd-plugins`` and ``python -m emssd.plugins``: what is installed, where it comes from, and its state."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence as Seq

from rich.console import Console
from rich.table import Table

from emssd.registry import Registry

__all__ = ["main"]


def main(arguments: Seq[str] | None = None) -> None:
    """Print a table of all plugins. Exits with 1 if one of them failed to load."""
    parser = argparse.ArgumentParser(prog="emssd-plugins", description="Lists drafters, backends and prompt sources.")
    parser.add_argument("command", nargs="?", choices=["list"], default="list", help="what to do (default: list)")
    parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the failures
        registry = Registry()
    table = Table("kind", "name", "state", "distribution", "version", "reason", box=None, pad_edge=False)
    for record in sorted(registry.records, key=lambda record: (record.kind, record.name)):
        table.add_row(record.kind, record.name, record.state, record.distribution, record.version, record.reason or "–")
    Console().print(table)
    if any(record.state == "failed" for record in registry.records):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
