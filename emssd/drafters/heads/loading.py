"""`HeadFiles`: reads a published head for one target; `Loaded`, the head, and how it is to be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from emssd.drafters.heads.containers import unwrapped
from emssd.drafters.heads.files import Checkpoint, cannot_load, read_checkpoint
from emssd.drafters.heads.formats import Format, expect
from emssd.drafters.heads.target import TargetSizes
from emssd.drafters.heads.weights import fill, made_empty, rename
from emssd.errors import ConfigError

__all__ = ["HeadFiles", "Loaded"]

Module = TypeVar("Module", bound=torch.nn.Module)

logger = logging.getLogger("emssd")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Module]):
    """A trained head, and how it is to be used.

    Attributes:
        head: with its weights.
        layers: the target's hidden states that it reads, see `emssd.drafters.heads.LAST_NORMED`.
        described: the conventions that were chosen, a line each.
    """

    head: Module
    layers: tuple[int, ...]
    described: tuple[str, ...]

    def log(self, drafter: str) -> None:
        """Log how the `drafter` of this name uses it."""
        for line in self.described:
            logger.info("drafter=%s: %s", drafter, line)


@dataclass(slots=True)
class HeadFiles:
    """The files of a trained head that is loaded for a target.

    Attributes:
        checkpoint: what they hold.
        target: that the head is to draft for.
        names: of the tensors, by the names of the module's parameters.
    """

    checkpoint: Checkpoint
    target: TargetSizes
    names: dict[str, str]

    @classmethod
    def read(
        cls,
        path: str,
        target: TargetSizes,
        *formats: Format,
        new_name: Callable[[str], str | None] | None = None,
    ) -> HeadFiles:
        """Read them.

        Args:
            path: folder, file of weights or hub id.
            target: that the head is to draft for.
            formats: of which the head is one.
            new_name: as `rename` takes it; ``None`` keeps the names of the files.

        Raises:
            ConfigError: they cannot be read, or hold something else.
        """
        checkpoint = read_checkpoint(path)
        expect(checkpoint, *formats)
        checkpoint = unwrapped(checkpoint)
        return cls(checkpoint, target, rename(checkpoint, new_name or str))

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of ``config.json``."""
        return self.checkpoint.config

    def cannot(self, why: str) -> ConfigError:
        """The error for this head, for the reason `why`."""
        return cannot_load(self.checkpoint.path, why)

    def check_sizes(self, hidden_size: object, vocab_size: object) -> None:
        """Refuse a head for another target; ``None`` is a size that its config does not say.

        Raises:
            ConfigError: a size is not the target's.
        """
        if hidden_size not in (None, self.target.hidden_size):
            raise self.cannot(
                f"it has a hidden size of {hidden_size}, and the target's is {self.target.hidden_size}; it was trained "
                f"for another target"
            )
        if vocab_size not in (None, self.target.vocab_size):
            raise self.cannot(f"its vocabulary has {vocab_size} tokens, and the target's has {self.target.vocab_size}")

    def target_ids(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The target's ``ids [draft_vocab_size]`` of the tokens that a head drafts, which its tensor `name` gives.

        Raises:
            ConfigError: they are not different ids of the target.
        """
        size = self.target.vocab_size
        if ids.ndim != 1 or not ((ids >= 0) & (ids < size)).all() or len(set(ids.tolist())) < len(ids):
            raise self.cannot(f"its {name} gives no {len(ids)} different tokens of the target's {size}")
        return ids.to(self.target.device)

    def drafted_ids(self, num_tokens: int) -> torch.Tensor | None:
        """``[num_tokens]`` the target's ids of those that a head drafts, from its ``d2t``, which holds what to add.

        ``None`` where there is no such tensor.

        Raises:
            ConfigError: these are not different ids of the target, or its ``t2d`` has others.
        """
        if "d2t" not in self.names:
            return None
        tensors = self.checkpoint.tensors
        offsets, draftable = tensors[self.names["d2t"]], tensors.get("t2d")
        if tuple(offsets.shape) != (num_tokens,):
            raise self.cannot(f"its d2t has {offsets.numel()} entries, and it drafts {num_tokens} tokens")
        ids = torch.arange(len(offsets)) + offsets.long()
        found = self.target_ids("d2t", ids)
        if draftable is not None:
            known = torch.zeros(self.target.vocab_size, dtype=torch.bool)
            known[ids] = True
            if not torch.equal(draftable.bool(), known):
                raise self.cannot("its d2t and t2d name different tokens")
        return found

    def filled(self, make: Callable[[], Module], names: Mapping[str, str] | None = None) -> Module:
        """The module that `make` gives, with the weights of `names`, by default all.

        Raises:
            ConfigError: weights are missing, left over, or have other shapes than the module.
            OutOfMemoryError: the device has no room for them.
        """
        module = made_empty(make)
        names = self.names if names is None else names
        fill(module, self.checkpoint, names, dtype=self.target.dtype, device=self.target.device)
        return module
