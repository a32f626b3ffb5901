"""One process of a tensor parallel run, started by torchrun: decodes every case, and process 0 writes what it found."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from emssd import Engine
from emssd.decoding.parallel import follow_unless_first
from emssd.errors import ConfigError, EmssdError, GroupError
from emssd.model import TargetModel, load_model, loading
from emssd.model.parallel import follower
from emssd.model.parallel.group import Group, Message, join
from emssd.plugins.registry import Registry
from tests.parallel.cases import MODELS, SAMPLING, backends, cases, decoded, drafter, headed, preempted

UNREADABLE = "opt-1"  # by the other processes than the first


def plant_told(patch: pytest.MonkeyPatch) -> None:
    """This process receives another token than process 0 sent, once."""
    hear = Group.hear

    def other(group: Group) -> tuple[list[Message], bytes]:
        messages, _ = hear(group)
        for place, (call, number, arguments) in enumerate(messages):
            if call == "run" and len(arguments[0][0]) == 3:
                ((request_ids, token_ids, *rest),) = arguments
                changed = [token_ids[0], (token_ids[1] + 1) % 13, *token_ids[2:]]
                messages[place] = Message(call, number, ((request_ids, changed, *rest),))
        return messages, pickle.dumps(messages)

    patch.setattr(Group, "hear", other)


def plant_computed(patch: pytest.MonkeyPatch) -> None:
    """A weight that all processes have is another one here, by its last bits."""
    load = follower.load_shard

    def other(*arguments: Any) -> tuple[TargetModel, Any]:
        target, tokenizer = load(*arguments)
        with torch.no_grad():
            target.model.model.norm.weight.mul_(1 + 1e-15)
        return target, tokenizer

    patch.setattr(follower, "load_shard", other)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {"told": plant_told, "computed": plant_computed}


def follow() -> None:
    """A process that is not the first: faults are planted here, one after the other; then none."""
    for plant in PLANTED.values():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            with pytest.raises(GroupError):
                follow_unless_first(Registry())
        join().is_broken = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_checkpoint", without(UNREADABLE, loading.load_checkpoint))
        follow_unless_first(Registry())


def without(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, on a machine whose disk has no folder `name`."""

    def other(path: str, **options: Any) -> Any:
        if Path(path).name == name:
            raise ConfigError("there is no such folder here")
        return load(path, **options)

    return other


def refused(act: Callable[[], Any]) -> str:
    """The sentence that refuses this."""
    with pytest.raises(EmssdError) as caught:
        act()
    return str(caught.value)


def main(folder: Path) -> None:
    """Process 0."""
    choices, said, found, heads = backends(), dict[str, str](), dict[str, list[list[int]]](), dict[str, list[int]]()
    for name in PLANTED:
        loaded = load_model(str(folder / "llama-0"), tensor_parallel=True, checksums=True)
        said[name] = refused(lambda loaded=loaded: decoded(loaded, "none", "ragged", None))  # type: ignore[misc]
        join().is_broken = False
    said["missing"] = refused(lambda: load_model(str(folder / "nowhere"), tensor_parallel=True))
    said["unreadable"] = refused(lambda: load_model(str(folder / UNREADABLE), tensor_parallel=True))
    for model in MODELS:
        loaded = load_model(str(folder / f"{model}-0"), tensor_parallel=True, checksums=model == "opt")
        heads[model] = [layer.num_kv_heads for layer in loaded[0].layers]
        for name, backend, sampling in cases(model):
            made = drafter(name, str(folder / model))
            tokens = decoded(loaded, made, choices[backend], SAMPLING[sampling])
            found[f"{model} {name} {backend} {sampling}"] = tokens
    again = preempted(load_model(str(folder / "llama-0"), tensor_parallel=True), "60KiB")
    perfect = load_model(str(folder / "perfect"), tensor_parallel=True)
    with_heads = {name: headed(perfect, name, folder) for name in ("eagle3", "eagle")}
    said["borrowed"] = refused(lambda: decoded(loaded, "early_exit", "ragged", None))
    said["shard"] = refused(lambda: Engine.from_model(loaded[0].model))
    (folder / "found.json").write_text(
        json.dumps({"tokens": found, "headed": with_heads, "preempted": again, "said": said, "heads": heads})
    )


if __name__ == "__main__":
    if join().rank:
        follow()
    main(Path(sys.argv[1]))
