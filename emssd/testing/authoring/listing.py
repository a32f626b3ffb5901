"""``emssd-plugins list``: every plugin, where it comes from, and its state."""

from __future__ import annotations

import warnings

from rich.table import Table

from emssd.errors.terminal import plain_console
from emssd.plugins.registry import Registry
from emssd.testing.authoring.watched import LOAD_SECONDS, Notes

__all__ = ["print_plugins"]


def print_plugins(notes: Notes) -> int:
    """Print a table of all plugins. Returns 1 if one of them failed to load, else 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the failures
        registry = Registry(on_load=lambda owner: notes.note(owner, "while it was loaded", LOAD_SECONDS))
    table = Table("kind", "name", "state", "distribution", "version", "notes", box=None, pad_edge=False)
    bits = {
        spec.name: f"batch-invariant: {getattr(spec, 'batch_invariant', '') or 'no'}"
        for spec in registry.specs("backend")
    }
    for record in sorted(registry.records, key=lambda record: (record.kind, record.name)):
        note = record.reason or (bits.get(record.name) if record.kind == "backend" else "") or "–"
        table.add_row(record.kind, record.name, record.state, record.distribution, record.version, note)
    plain_console().print(table)
    return int(any(record.state == "failed" for record in registry.records))
