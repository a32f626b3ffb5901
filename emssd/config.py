"""The run's options as dataclasses, and their place in Hydra's ConfigStore. Defaults live here and nowhere else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from emssd.hookspecs import Spec
from emssd.registry import KINDS, Registry

__all__ = ["Check", "ModelConfig", "RunConfig", "conf_dir", "register_configs"]


class Check(str, Enum):
    """What the output is compared with."""

    greedy = "greedy"


@dataclass
class ModelConfig:
    """Options of the target model.

    Attributes:
        path: local folder, id of the Hugging Face hub, or ``demo`` for the embedded model.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:1``, …
        max_model_len: longest sequence, prompt and output together; ``null`` takes the model's own limit.
    """

    path: str = "demo"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None


@dataclass
class RunConfig:
    """Options of one run of ``python -m emssd``.

    Attributes:
        drafter, backend, model, data: config groups; see ``--help`` for what is installed.
        batch_size: rows decoded together.
        max_new_tokens: upper limit of new tokens per prompt.
        check: ``greedy`` also decodes plainly and compares every token; this gives the speed-up as well.
        ignore_eos: let only the limit end a sequence.
        output_dir: where ``generations.jsonl``, ``metrics.json`` and ``config.yaml`` go.
        progress: show a progress bar.
        num_threads: CPU threads of PyTorch; ``null`` leaves its choice.
    """

    drafter: Any = MISSING
    backend: Any = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Any = MISSING
    batch_size: int = 8
    max_new_tokens: int = 128
    check: Check | None = None
    ignore_eos: bool = False
    output_dir: str = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"
    progress: bool = True
    num_threads: int | None = None


def conf_dir() -> Path:
    """The config directory: the packaged one if it exists, else the repository's."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


def register_configs(registry: Registry) -> None:
    """Put the options of the run and of every plugin into Hydra's ConfigStore."""
    store = ConfigStore.instance()
    store.store(name="run", node=RunConfig)
    store.store(group="model", name="hf", node=ModelConfig, provider="emssd")
    for kind in KINDS:
        for spec in registry.specs(kind):
            try:
                node = _options_node(spec)
            except OmegaConfBaseException as error:  # of its many, all say that a field's type or default cannot be
                reason = str(error).partition("\n")[0]
                registry.withdraw(kind, spec.name, f"{spec.config.__name__} cannot be an options class: {reason}")
            else:
                store.store(group=kind, name=spec.name, node=node, provider=registry.source(kind, spec.name))


def _options_node(spec: Spec) -> DictConfig:
    """The plugin's own dataclass, and the name by which its node is found again after composition."""
    options = dataclasses.make_dataclass(spec.config.__name__, [("name", str, spec.name)], bases=(spec.config,))
    node: DictConfig = OmegaConf.structured(options)
    for _, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)  # an option that is a dictionary takes any key
    return node
