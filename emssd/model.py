"""`TargetModel`: an unmodified Hugging Face causal LM, whose attention goes through one registered function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, StepPlan
from emssd.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from emssd.interface import ATTENTION_NAME, MASKED_NAME, Attend, Visible, implementation, register, with_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.compiled import CompiledForward

__all__ = ["Attend", "LoadModel", "TargetModel", "load_model"]

LoadModel = Callable[..., tuple["TargetModel", Any]]
"""`load_model`, or what stands in for it."""


class TargetModel:
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface. Between two calls it is left as it was.
        max_model_len: longest sequence to allow; ``None`` takes the model's own limit.
        compile: run the forward pass as one compiled program, see `emssd.compiled`. Where that cannot be, a warning
            says why, and the model runs as it is.

    Attributes:
        compiled: that program, or ``None``.

    Raises:
        UnsupportedModelError: with the reason, if its output would not be that of the model.
        ConfigError: `max_model_len` beyond the model's limit.
    """

    def __init__(self, model: PreTrainedModel, *, max_model_len: int | None = None, compile: bool = False) -> None:
        from emssd import masks, model_support, probe

        register()
        self.model: Any = model  # Transformers' own annotations do not describe how its models are called
        model.eval()  # type: ignore[no-untyped-call]  # it has no annotations
        model_support.check_config(model.config, type(model))
        self.max_model_len = model_support.resolve_max_model_len(model.config, max_model_len)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._windows: dict[int, int] = {}  # those of layers that do not pass theirs to the attention function
        self._windows = masks.learn_windows(self)
        self.layers: tuple[LayerSpec, ...] = probe.probe_layers(self)
        self.compiled = self._compile() if compile else None

    def kv_cache_spec(self, max_batch_size: int) -> KVCacheSpec:
        """The KV cache that this model needs for batches of up to `max_batch_size` rows."""
        return KVCacheSpec(self.layers, self.dtype, self.device, max_batch_size, self.max_model_len)

    def __call__(self, plan: StepPlan, backend: AttentionBackend) -> torch.Tensor:
        """Run one step. Returns logits ``[R, vocab]`` of the wanted rows only."""

        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self.layers[layer]:
                raise UnsupportedModelError(
                    f"layer {layer} changed its attention from {self.layers[layer]} to {seen} while running; "
                    f"emssd serves models whose layers attend by fixed rules"
                )
            return backend.forward(plan, layer, query, key, value)

        def forward() -> torch.Tensor:
            run = self.compiled or self.run
            return run(plan.input_ids, plan.position_ids, attend, plan.logits_to_keep).flatten(0, 1)

        logits = forward() if plan.replay is None else plan.replay(forward)
        return logits if plan.logit_index is None else logits[plan.logit_index]

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        logits_to_keep: torch.Tensor | int = 0,
        *,
        masks: dict[int, Visible] | None = None,
    ) -> torch.Tensor:
        """Call the model with `attend` in the place of its attention. Returns logits ``[b, m, vocab]``.

        Given `masks`, the model makes its masks too, and it is filled with the function behind that of each layer.
        """
        keywords: dict[str, Any] = {"emssd_attend": with_windows(attend, self._windows)}
        if masks is not None:
            keywords["emssd_masks"] = masks
        with implementation(self.model, ATTENTION_NAME if masks is None else MASKED_NAME):
            output = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                **keywords,
            )
        logits: torch.Tensor = output.logits
        return logits

    def _compile(self) -> CompiledForward | None:
        from emssd.compiled import CompiledForward, CompileError

        try:
            return CompiledForward(self)
        except CompileError as error:
            warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    compile: bool = False,
    architecture: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[TargetModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or the hub.

    Args:
        path: folder or hub id; ``demo`` and ``demo-draft`` are the embedded pair.
        dtype: ``auto`` (the checkpoint's), ``float64``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA if there is one), or a torch device.
        max_model_len, compile: see `TargetModel`.
        architecture: make a model of this shape with random weights and no tokenizer, and let `path` be no more than
            its name; see `emssd.random_weights.counting_model`. Its ``auto`` dtype is bfloat16.
        trust_remote_code: run Python code that comes with the checkpoint, where it needs some.

    Raises:
        ConfigError: no such model, dtype or device; or a checkpoint that is damaged or not whole.
        UnsupportedModelError: see `TargetModel`.
        OutOfMemoryError: there is no room for the weights.
    """
    from emssd.checkpoint import load_checkpoint

    if architecture:
        from emssd.random_weights import counting_model

        kind = _resolve_dtype("bfloat16" if dtype == "auto" else dtype)
        assert isinstance(kind, torch.dtype)
        made = counting_model(architecture, kind, _resolve_device(device))
        return TargetModel(made, max_model_len=max_model_len, compile=compile), None
    torch_dtype, torch_device = _resolve_dtype(dtype), _resolve_device(device)
    model, tokenizer = load_checkpoint(
        path, dtype=torch_dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    try:
        model.to(torch_device)  # type: ignore[arg-type]  # annotated for no device at all
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{torch_device} has no room for the weights of {path!r}; take a smaller one") from error
    return TargetModel(model, max_model_len=max_model_len, compile=compile), tokenizer


def _resolve_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; choose auto, {', '.join(known)}")
    return known[name]


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {_first_line(error)} Try device=cpu.") from error
    return device


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    first = text[0].rstrip(" :,") if text else type(error).__name__
    return first if first.endswith((".", "!")) else first + "."
