"""`ModelOptions`: the model that is asked for, and in what form; the library and the command line share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emssd.errors import ConfigError

__all__ = ["ModelOptions"]


@dataclass
class ModelOptions:
    """Options of the target model.

    Attributes:
        path: local folder, .gguf file, id of the Hugging Face hub, or ``demo`` for the embedded model.
        gguf_file: the name of a .gguf file in the folder or on the hub; see docs/how_to/gguf.md.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:1``, …
        max_model_len: longest sequence, prompt and output together; ``null`` takes the model's own limit.
        compile: run the forward pass as one compiled program, on a CPU: ``auto``, ``true`` or ``false``. Compiling
            takes half a minute or more, once for a model; the program is kept. ``auto`` uses a kept program, and
            compiles where a run is long enough to pay for it. A draft model is compiled as well.
        device_map: put a model's layers on several devices: ``auto``, ``balanced``, ``sequential``, or a device for
            each module, as in ``{model.embed_tokens: 0, model.layers.0: cpu, …}``; see docs/how_to/tensor_parallel.md.
        architecture: for timing without a checkpoint: make a model of this shape, a config of Transformers, with random
            weights; `path` is then only its name, and its ``auto`` dtype is bfloat16. ``data=random`` gives it prompts.
        trust_remote_code: run Python code that comes with the checkpoint, or with that of a draft model, where
            Transformers has none for it; that code can do anything.
        weights: ``auto``; ``dense`` unpacks a .gguf file, which ``auto`` keeps packed on a CPU; or ``int8``: weights of
            linear layers are rounded to a byte each, with a scale for 32, on a CPU. That is another model, somewhat
            worse and faster; speculation does not change its text.
        batch_invariant: an uncompiled model on a CPU computes the same bits in any batch, more slowly; see
            docs/explanation/batch_invariant.md.
        tensor_parallel: spread the model over the processes that ``torchrun --nproc-per-node N -m emssd`` starts.
    """

    path: str = "demo"
    gguf_file: str = ""
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    compile: bool | str = "auto"
    device_map: Any = None
    architecture: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    weights: str = "auto"
    batch_invariant: bool = False
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        self.dtype = str(self.dtype).removeprefix("torch.")  # the library takes PyTorch's dtypes too

    def check(self) -> None:
        """Raise ConfigError for a word that is no choice, or for options that exclude one another."""
        if self.weights not in ("auto", "int8", "dense"):
            raise ConfigError(f"model.weights is {self.weights!r}; choose auto, int8 or dense")
        if self.compile not in (True, False, "auto"):
            raise ConfigError(f"model.compile is {self.compile}; it must be true, false or auto")
        one_device = {
            "model.compile=true": self.compile is True,
            "model.batch_invariant=true": self.batch_invariant,
            "model.architecture": bool(self.architecture),
            "model.weights=int8": self.weights == "int8",
        }
        others = {
            "model.device": self.device != "auto",
            **one_device,
            "model.tensor_parallel=true": self.tensor_parallel,
        }
        if self.device_map is not None and (name := _first_set(others)):
            raise ConfigError(f"model.device_map puts one model on several devices by itself; leave it or {name} out")
        if self.tensor_parallel and (name := _first_set(one_device)):
            save = ", or save a model of random weights to a folder and give that as model.path"
            raise ConfigError(
                f"{name} is for a whole model in one process; leave it or model.tensor_parallel out"
                + (save if self.architecture else "")
            )


def _first_set(options: Mapping[str, bool]) -> str:
    return next((name for name, is_set in options.items() if is_set), "")
