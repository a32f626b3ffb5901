"""Puts an engine together from names and configs; the only place that knows both the registry and the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.draft import Drafter, DrafterContext
from emssd.engine import Engine
from emssd.errors import PluginError
from emssd.model import TargetModel, load_model
from emssd.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["assemble", "eos_token_ids", "from_model", "from_pretrained", "make_backend", "make_drafter"]


def from_pretrained(
    path: str = "demo",
    *,
    drafter: Any = "llma",
    backend: Any = "ragged",
    batch_size: int = 8,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
) -> Engine:
    """Load a model and build an engine for it.

    Args:
        path: local folder, hub id, or ``demo`` for the embedded model.
        drafter: a name such as ``"llma"``, a plugin's config such as ``LLMAConfig(copy_length=10)``, or a `Drafter`.
        backend: a name or a plugin's config.
        batch_size: rows decoded together.
        dtype, device, max_model_len: see `emssd.model.load_model`.
    """
    registry = Registry()
    if not isinstance(drafter, Drafter):
        registry.resolve("drafter", drafter)  # before the weights are loaded
    registry.resolve("backend", backend)
    target, tokenizer = load_model(path, dtype=dtype, device=device, max_model_len=max_model_len)
    return assemble(target, tokenizer, drafter=drafter, backend=backend, batch_size=batch_size, registry=registry)


def from_model(
    model: PreTrainedModel,
    tokenizer: Any = None,
    *,
    drafter: Any = "llma",
    backend: Any = "ragged",
    batch_size: int = 8,
    max_model_len: int | None = None,
) -> Engine:
    """Build an engine around a model that is already loaded; see `from_pretrained` for the options."""
    target = TargetModel(model, max_model_len=max_model_len)
    return assemble(target, tokenizer, drafter=drafter, backend=backend, batch_size=batch_size)


def assemble(
    target: TargetModel,
    tokenizer: Any,
    *,
    drafter: Any,
    backend: Any,
    batch_size: int,
    registry: Registry | None = None,
    eos: Iterable[int] | None = None,
) -> Engine:
    """An engine for `target`; `drafter` and `backend` as in `from_pretrained`."""
    registry = registry or Registry()
    drafter_name = type(drafter).__name__
    if not isinstance(drafter, Drafter):
        name = registry.resolve("drafter", drafter)[0].name
        drafter_name = f"{name!r} ({registry.source('drafter', name)})"
        drafter = make_drafter(target, tokenizer, drafter, backend, batch_size, registry)
    return Engine(
        target,
        make_backend(target.kv_cache_spec(batch_size), backend, registry),
        drafter,
        tokenizer=tokenizer,
        batch_size=batch_size,
        eos_token_ids=eos_token_ids(target, tokenizer) if eos is None else eos,
        drafter_name=drafter_name,
    )


def make_backend(spec: KVCacheSpec, choice: Any, registry: Registry) -> AttentionBackend:
    """A backend allocated for `spec`.

    Raises:
        PluginError: the backend cannot serve it, with its reasons.
    """
    plugin, config = registry.resolve("backend", choice)
    backend: AttentionBackend = plugin.build(config)
    if reasons := backend.unsupported(spec):
        raise PluginError(f"backend {plugin.name!r} cannot serve this model: {'; '.join(reasons)}. Try backend=ragged.")
    backend.allocate(spec)
    return backend


def make_drafter(
    target: TargetModel, tokenizer: Any, choice: Any, backend: Any, batch_size: int, registry: Registry
) -> Drafter:
    """A drafter for `target`."""

    def load(path: str) -> tuple[TargetModel, Any]:
        return load_model(path, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))

    plugin, config = registry.resolve("drafter", choice)
    context = DrafterContext(
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        max_batch_size=batch_size,
        device=target.device,
        dtype=target.dtype,
        tokenizer=tokenizer,
        load_model=load,
        make_backend=lambda spec: make_backend(spec, backend, registry),
    )
    drafter: Drafter = plugin.build(config, context)
    return drafter


def eos_token_ids(target: TargetModel, tokenizer: Any) -> frozenset[int]:
    """What ends a sequence: the model's generation config, else its config, else its tokenizer; may be empty."""
    for source in (getattr(target.model, "generation_config", None), target.model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset()
