"""The folder of a model: whether it can be one, told by its small files in milliseconds, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from emssd.data.demo import model_path
from emssd.data.typed import object_in
from emssd.errors import ConfigError

__all__ = ["WHAT_TO_GIVE", "cannot_load", "check_folder", "check_layers", "gguf_of", "source_of"]

WHAT_TO_GIVE = (
    "Give a local folder with config.json and weights, a .gguf file, a model id of the Hugging Face hub, or 'demo' for "
    "the embedded model."
)
_EMBEDDED = {"demo": "target", "demo-draft": "draft"}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def cannot_load(path: str, why: str) -> ConfigError:
    """The error for the model `path`."""
    return ConfigError(f"cannot load the model {path!r}: {why}")


def source_of(path: str) -> str:
    """The folder of an embedded model, or `path` itself, a .gguf file too. Raises ConfigError: there is no such one."""
    if path in _EMBEDDED:
        return str(model_path(_EMBEDDED[path]))
    folder = Path(path).expanduser()
    is_file = folder.suffix == ".gguf"
    if os.path.isdir(folder):  # unlike pathlib, false also for what no folder could be called
        return str(folder)
    if os.path.exists(folder):
        if is_file:
            return str(folder)
        raise cannot_load(path, f"this is a file. {WHAT_TO_GIVE}")
    if is_file or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise cannot_load(path, f"there is no such {'file' if is_file else 'folder'}. {WHAT_TO_GIVE}")
    return path


def gguf_of(path: str, name: str = "") -> Path | None:
    """The GGUF file of a model: `path` itself, `name` in a folder or on the hub, or the one file of a folder.

    ``None`` if the model is none. Raises ConfigError: there is no such file, or there are several.
    """
    source = Path(source_of(path))
    if os.path.isfile(source):
        return source
    if not os.path.isdir(source):
        return _downloaded(path, name) if name else None
    names = sorted(file.name for file in source.glob("*.gguf"))
    if name and name not in names:
        raise cannot_load(path, f"there is no {name} in it, which model.gguf_file names; it has {', '.join(names)}")
    if not name and any(_weights(source)):
        return None
    if not name and len(names) > 1:
        raise cannot_load(path, f"choose one of its files with model.gguf_file: {', '.join(names)}")
    return source / (name or names[0]) if names else None


def _downloaded(path: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except (OSError, ValueError) as error:
        raise cannot_load(path, f"the hub has no {name}, which model.gguf_file names, or cannot be reached") from error


def _weights(folder: Path) -> tuple[Path, ...]:
    return (*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin"))


def check_folder(path: str) -> None:
    """Refuse a folder without a model; an id of the hub passes."""
    folder = Path(source_of(path))
    if not os.path.isdir(folder):
        return
    if (folder / "adapter_config.json").is_file() and not any(folder.glob("*model*.safetensors")):
        base = object_in(folder / "adapter_config.json").get("base_model_name_or_path")
        raise cannot_load(
            path,
            f"it holds an adapter of PEFT for {base}; give a folder with both, which "
            f"AutoPeftModelForCausalLM.from_pretrained({path!r}).merge_and_unload().save_pretrained(FOLDER) writes",
        )
    if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        raise cannot_load(path, f"there is no config.json in it. {WHAT_TO_GIVE}")


def check_layers(path: str) -> None:
    """Refuse a config with more layers than its weights have bytes; Transformers makes lists of that length."""
    folder = Path(source_of(path))
    config = object_in(folder / "config.json")  # to load it says what is wrong with one that is none
    parts = [config, *(part for part in [config.get("text_config")] if isinstance(part, dict))]
    most = max((part[name] for part in parts for name in _LAYERS if isinstance(part.get(name), int)), default=0)
    files = _weights(folder)
    if files and most > (size := sum(file.stat().st_size for file in files)):
        raise cannot_load(
            path, f"config.json says {most} layers, and its weights have {size} bytes; bring both from one place"
        )
