"""`Lent`: what a drafter with a head of its own borrows of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafters.heads.target import TargetSizes
from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget

__all__ = ["Lent"]


@dataclass(frozen=True, slots=True)
class Lent:
    """The parts that a drafter with a head of its own borrows, see `DrafterContext`.

    Attributes:
        target: whose embeddings and vocabulary projection the head may use.
        sizes: of the target.
        spec: what the target's KV cache has to hold.
        make_cache: gives the head's KV cache.
        compile: whether the target runs as a compiled program, and the head is to do so, too.
    """

    target: BorrowedTarget
    sizes: TargetSizes
    spec: KVCacheSpec
    make_cache: Callable[[KVCacheSpec], AttentionBackend]
    compile: bool = False

    @classmethod
    def by(cls, context: DrafterContext, drafter: str) -> Lent:
        """The parts that `context` lends to the `drafter` of this name.

        Raises:
            ConfigError: there is no model to borrow of.
        """
        target, spec, make_cache = context.target, context.cache_spec, context.make_cache
        if target is None or spec is None or make_cache is None:
            raise ConfigError(
                f"drafter={drafter} reads hidden states of the target, and there is no model to take them of"
            )
        sizes = TargetSizes(context.vocab_size, target.hidden_size, target.num_layers, target.dtype, target.device)
        return cls(target, sizes, spec, make_cache, target.is_compiled)
