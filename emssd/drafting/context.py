"""`DrafterContext`: what a drafter may borrow when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafting.drafter import Drafter
from emssd.model import TargetModel

__all__ = ["DrafterContext"]


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may need to know or to borrow when it is built; handed to the plugin's ``build``.

    Attributes:
        vocab_size: drafted ids must be below it.
        max_batch_size: largest number of rows of a batch.
        tokenizer: the target's tokenizer, if there is one.
        load_model: ``load_model(path)`` gives a further model, ready to run, and its tokenizer (or ``None``).
        make_backend: ``make_backend(spec)`` gives a further attention backend of the kind the target uses. It is
            allocated once all drafters are built, as they share one limit of memory: use it from `propose` on.
        make_drafter: ``make_drafter(name, options)`` gives a further drafter, for those that combine others.
    """

    vocab_size: int
    max_batch_size: int
    tokenizer: Any
    load_model: Callable[[str], tuple[TargetModel, Any]]
    make_backend: Callable[[KVCacheSpec], AttentionBackend]
    make_drafter: Callable[[str, Mapping[str, Any]], Drafter]
