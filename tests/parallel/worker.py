"""One process of a tensor parallel run, started by torchrun: all decode every case, and process 0 writes what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emssd import Engine
from emssd.errors import ConfigError, EmssdError
from emssd.model import ModelOptions, load_model
from emssd.model.load import loading
from emssd.model.run.parallel import join
from tests.parallel.cases import MODELS, SAMPLING, backends, cases, decoded, drafter, headed, preempted

UNREADABLE = "opt-1"  # by the other processes than the first


def without(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, on a machine whose disk has no folder `name`."""

    def other(options: ModelOptions, *more: Any, **keywords: Any) -> Any:
        if Path(options.path).name == name:
            raise ConfigError("there is no such folder here")
        return load(options, *more, **keywords)

    return other


def refused(act: Callable[[], Any]) -> str:
    """The sentence that refuses this."""
    with pytest.raises(EmssdError) as caught:
        act()
    return str(caught.value)


def main(folder: Path) -> None:
    """Decode every case."""
    choices, said, found, heads = backends(), dict[str, str](), dict[str, list[list[int]]](), dict[str, list[int]]()
    missing, unreadable = (ModelOptions(str(folder / name), tensor_parallel=True) for name in ("nowhere", UNREADABLE))
    said["missing"] = refused(lambda: load_model(missing))
    with pytest.MonkeyPatch.context() as patch:
        if join().rank:
            patch.setattr(loading, "load_checkpoint", without(UNREADABLE, loading.load_checkpoint))
        said["unreadable"] = refused(lambda: load_model(unreadable))
    for model in MODELS:
        loaded = load_model(ModelOptions(str(folder / f"{model}-0"), tensor_parallel=True))
        heads[model] = [layer.num_kv_heads for layer in loaded[0].layers]
        for name, backend, sampling in cases(model):
            made = drafter(name, str(folder / model))
            budget = "adaptive" if name == "adaptive" else "fixed"
            tokens = decoded(loaded, made, choices[backend], SAMPLING[sampling], budget)
            found[f"{model} {name} {backend} {sampling}"] = tokens
    again = preempted(load_model(ModelOptions(str(folder / "llama-0"), tensor_parallel=True)), "60KiB")
    perfect = load_model(ModelOptions(str(folder / "perfect"), tensor_parallel=True))
    with_heads = {name: headed(perfect, name, folder) for name in ("eagle3", "eagle")}
    said["borrowed"] = refused(lambda: decoded(loaded, "self", "ragged", None))
    said["shard"] = refused(lambda: Engine.from_model(loaded[0].model))
    if join().rank == 0:
        (folder / "found.json").write_text(
            json.dumps({"tokens": found, "headed": with_heads, "preempted": again, "said": said, "heads": heads})
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
