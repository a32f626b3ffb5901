"""`DrafterContext`: what a drafter may borrow when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafting.drafter import Drafter
from emssd.model import BorrowedTarget, ModelRunner

__all__ = ["DrafterContext"]


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The knowledge and the parts that a drafter may need when it is built; handed to the plugin's ``build``.

    Attributes:
        vocab_size: drafted ids must be below it.
        tokenizer: the target's tokenizer, if there is one.
        load_runner: ``load_runner(path, trees=False, accept=…)`` gives a further model with a KV cache of its own, and
            its tokenizer (or ``None``); `trees` says whether its steps hold token trees. ``accept(tokenizer)`` may
            raise before weights are read. The memory of all caches is divided once all drafters are built: run it from
            `propose` on.
        make_drafter: ``make_drafter(name, options)`` gives a further drafter, for drafters that combine several.
        target: device, dtype, embeddings, first layers, final norm, LM head and logits of the target, to be borrowed;
            ``None`` where there is no model.
        cache_spec: what the target's KV cache has to hold; ``None`` where there is no model.
        make_cache: ``make_cache(spec)`` gives a KV cache for layers of the drafter's own, on the backend of the target;
            the `spec` is `cache_spec` with other layers, or with trees. It shares the memory as a model's does, and is
            of use from `propose` on. ``None`` where there is no model.
        on_drafter_error: ``"disable"`` or ``"fail"``: how a drafter that combines several treats one that fails.
    """

    vocab_size: int
    tokenizer: Any
    load_runner: Callable[..., tuple[ModelRunner, Any]]
    make_drafter: Callable[[str, Mapping[str, Any]], Drafter]
    on_drafter_error: str = "disable"
    target: BorrowedTarget | None = None
    cache_spec: KVCacheSpec | None = None
    make_cache: Callable[[KVCacheSpec], AttentionBackend] | None = None
