"""``emssd-plugins list``: every plugin, where it comes from, and its state. And ``emssd-plugins inspect PATH``: five
lines about a checkpoint, its drafter and its missing tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from emssd_heads.files import Checkpoint, read_checkpoint, reading_config
from emssd_heads.formats import Format, detect, unwrapped
from rich.table import Table

from emssd.cli.terminal import plain_console
from emssd.errors import ConfigError
from emssd.hooks.hookspecs import DrafterSpec
from emssd_testing.authoring.watched import Notes

__all__ = ["inspect", "print_plugins"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NEEDED: dict[Format, tuple[str, ...]] = {
    Format.eagle: ("fc.weight",),
    Format.eagle3: ("norm.weight",),
    Format.peagle: ("norm.weight", "mask_hidden", "fc.weight"),
    Format.dflash: ("norm.weight", "hidden_norm.weight", "fc.weight"),
    Format.kangaroo: ("norm.weight",),
}
_OPTIONS = {Format.dflash: ("block_size", "mask_token_id"), Format.peagle: ("mask_token_id",)}


def print_plugins(notes: Notes) -> int:
    """Print a table of all plugins. Returns 1 if one of them failed to load, else 0."""
    registry = notes.registry()
    table = Table("kind", "name", "state", "distribution", "version", box=None, pad_edge=False)
    table.add_column("notes", overflow="fold")  # a reason is told to its end
    bits = {
        spec.name: f"batch-invariant: {getattr(spec, 'batch_invariant', '') or 'no'}"
        for spec in registry.specs("backend")
    }
    for record in sorted(registry.records, key=lambda record: (record.kind, record.name)):
        note = record.reason or (bits.get(record.name) if record.kind == "backend" else "") or "–"
        table.add_row(record.kind, record.name, record.state, record.distribution, record.version, note)
    plain_console().print(table)
    return int(any(record.state == "failed" for record in registry.records))


def inspect(path: str) -> tuple[list[str], bool]:
    """The lines that describe the checkpoint at `path`, and whether a drafter reads it and nothing is known to lack.

    A file that cannot be read gives one line, which says why. Sizes are compared with a target when it is loaded.
    """
    try:
        checkpoint = read_checkpoint(path)
        with reading_config(path):
            kind = detect(checkpoint)
            checkpoint = unwrapped(checkpoint)
            specs = Notes().registry().specs("drafter")
            readers = [spec.name for spec in specs if isinstance(spec, DrafterSpec) and kind.name in spec.reads]
            lacking = list(_lacking(checkpoint, kind))
            return _lines(checkpoint, kind, lacking, readers), bool(readers) and not lacking
    except ConfigError as error:
        return [str(error)], False


def _lines(checkpoint: Checkpoint, kind: Format, lacking: list[str], readers: list[str]) -> list[str]:
    config, tensors = checkpoint.config, checkpoint.tensors
    of, numbers = "", sum(tensor.numel() for tensor in tensors.values())
    if (container := config.get("speculators_model_type")) is not None:
        of = f", {container} in a container of speculators {config.get('speculators_version', 'of an unknown version')}"
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    sizes = f"hidden size {config.get('hidden_size', 'unknown')}, vocabulary {config.get('vocab_size', 'unknown')}"
    kinds = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    use = " or ".join(f"drafter={name} drafter.path={checkpoint.path}" for name in readers)
    return [
        f"what it is: {kind.value}{of}",
        f"drafts with: {use or 'no installed drafter reads it'}",
        f"trained for: {verifier or 'a target that it does not name'}, {sizes}",
        f"weights: {len(tensors)} tensors, {numbers:,} numbers, {kinds}; read from {checkpoint.source.name}",
        f"missing: {', '.join(lacking) or 'nothing that can be told without the target'}",
    ]


def _lacking(checkpoint: Checkpoint, kind: Format) -> Iterator[str]:
    """The tensors that every checkpoint of this kind has, and this one lacks."""
    config = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    names = {name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in checkpoint.tensors}
    yield from (f"{name} in config.json" for name in _OPTIONS.get(kind, ()) if config.get(name) is None)
    yield from (name for name in _NEEDED.get(kind, ()) if name not in names)
    if kind in _NEEDED:
        for layer in range(min(int(config.get("num_hidden_layers") or 1), 128)):
            for part in _PROJECTIONS:
                if f"layers.{layer}.self_attn.{part}.weight" not in names:
                    yield f"layers.{layer}.self_attn.{part}.weight"
