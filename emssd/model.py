"""`TargetModel`: an unmodified Hugging Face causal LM, whose attention goes through one registered function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, StepPlan
from emssd.errors import ConfigError, OutOfMemoryError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.compiled import CompiledForward

__all__ = ["LoadModel", "TargetModel", "load_model"]

# Not "emssd_flash…": Transformers searches this name for the substring "flash" and then wants flash-attn.
ATTENTION_NAME = "emssd"

LoadModel = Callable[..., tuple["TargetModel", Any]]
"""`load_model`, or what stands in for it."""

Attend = Callable[[int, LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Keywords that models hand to every attention function and that do not change what attention computes here:
# positions are applied already, caching is ours, and the rest is bookkeeping of other implementations.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
     "is_causal", "layer_head_mask", "head_mask", "cache_position", "position_embeddings", "deterministic"}
)  # fmt: skip


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
        from transformers import AttentionInterface

        from emssd import model_support

        AttentionInterface.register(ATTENTION_NAME, _attention)
        self.model: Any = model  # Transformers' own annotations do not describe how its models are called
        model.eval()  # type: ignore[no-untyped-call]  # it has no annotations
        model_support.check_config(model.config, type(model))
        self.max_model_len = model_support.resolve_max_model_len(model.config, max_model_len)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.layers: tuple[LayerSpec, ...] = model_support.probe_layers(self)
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
    ) -> torch.Tensor:
        """Call the model with `attend` in the place of its attention. Returns logits ``[b, m, vocab]``."""
        with self._attention_implementation(ATTENTION_NAME):
            output = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                emssd_attend=attend,
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

    @contextmanager
    def _attention_implementation(self, name: str) -> Iterator[None]:
        """Set the model's attention for one call, so that a caller's own model still works as before after it."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = before


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    emssd_attend: Attend | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: ``query [b, heads, n, dim]`` in, ``[b, n, heads, dim]`` out."""
    name = type(module).__name__
    if emssd_attend is None:
        raise UnsupportedModelError(f"{name} does not pass keywords on to its attention function, so no KV cache")
    refused = sorted(key for key, given in features.items() if given is not None and key not in _HARMLESS)
    if refused or dropout or attention_mask is not None:
        what = ", ".join(refused) or ("dropout" if dropout else "an attention mask of its own")
        raise UnsupportedModelError(f"{name} asks its attention for {what}, which emssd does not compute")
    batch, num_heads, num_tokens, key_dim = query.shape
    spec = LayerSpec(
        num_qo_heads=num_heads,
        num_kv_heads=key.shape[1],
        key_dim=key_dim,
        value_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else key_dim**-0.5,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    out = emssd_attend(
        int(module.layer_idx),  # type: ignore[arg-type]  # every attention module of Transformers has this integer
        spec,
        query.transpose(1, 2).reshape(batch * num_tokens, num_heads, key_dim),
        key.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, key_dim),
        value.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, spec.value_dim),
    )
    return out.view(batch, num_tokens, num_heads, spec.value_dim), None


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
