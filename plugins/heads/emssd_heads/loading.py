"""`HeadFiles`: reads a published head for a target; `TargetWeights`: what it borrows; `Loaded`: how it is used."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafting import DrafterContext
from emssd.errors import ConfigError, OutOfMemoryError
from emssd.model import BorrowedTarget
from emssd_heads.files import Checkpoint, cannot_load, read_checkpoint, reading_config
from emssd_heads.formats import Format, expect, unwrapped
from emssd_heads.head import Head
from emssd_heads.target import TargetSizes

__all__ = ["HeadFiles", "Loaded", "TargetWeights"]

AnyLoaded = TypeVar("AnyLoaded", bound="Loaded[Any]")
Module = TypeVar("Module", bound=torch.nn.Module)

logger = logging.getLogger("emssd")

_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # older versions stored what is computed


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Module]):
    """A trained head, and how it is to be used.

    Attributes:
        head: with its weights.
        layers: the target's hidden states that it reads, see `emssd_heads.LAST_NORMED`.
        described: the conventions that were chosen, a line each.
        prefix: a layer that hidden states go through before `head` reads them.
    """

    head: Module
    layers: tuple[int, ...]
    described: tuple[str, ...]
    prefix: Head | None = None


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The parts that a drafter with a head of its own borrows, see `DrafterContext`.

    Attributes:
        target: whose embeddings and vocabulary projection the head may use.
        sizes: of the target.
        spec: what the target's KV cache has to hold.
        make_cache: gives the head's KV cache.
        compile: whether the target runs as a compiled program, and the head is to do so, too.
        drafter: the name of the drafter.
    """

    target: BorrowedTarget
    sizes: TargetSizes
    spec: KVCacheSpec
    make_cache: Callable[[KVCacheSpec], AttentionBackend]
    compile: bool = False
    drafter: str = ""

    @classmethod
    def by(cls, context: DrafterContext, drafter: str) -> TargetWeights:
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
        return cls(target, sizes, spec, make_cache, target.is_compiled, drafter)

    def loaded(self, path: str | None, load: Callable[[str, TargetSizes], AnyLoaded]) -> AnyLoaded:
        """The head at `path` that `load` gives for the target; how it is used is logged.

        Raises:
            ConfigError: the option ``path`` is not given.
        """
        if path is None:
            raise ConfigError(
                f"drafter={self.drafter} drafts with a trained head: give drafter.path=FOLDER, or a hub id"
            )
        loaded = load(path, self.sizes)
        for line in loaded.described:
            logger.info("drafter=%s: %s", self.drafter, line)
        return loaded


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
            new_name: see `renamed`; by default, the module's names are those of the files.

        Raises:
            ConfigError: they cannot be read, or hold something else.
        """
        checkpoint = read_checkpoint(path)
        expect(checkpoint, *formats)
        files = cls(unwrapped(checkpoint), target, {})
        files.names = files.renamed(new_name or str)
        return files

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of ``config.json``."""
        return self.checkpoint.config

    def cannot(self, why: str) -> ConfigError:
        """The error for this head, for the reason `why`."""
        return cannot_load(self.checkpoint.path, why)

    def reading_config(self) -> AbstractContextManager[None]:
        """For what reads its ``config.json``. Raises ConfigError: a value is of another type than the body takes."""
        return reading_config(self.checkpoint.path)

    def renamed(self, new_name: Callable[[str], str | None]) -> dict[str, str]:
        """The names of the tensors, by those that `new_name` gives; ``None`` is for a tensor that nobody needs.

        Raises:
            ConfigError: two tensors have the same place.
        """
        names: dict[str, str] = {}
        for name in self.checkpoint.tensors:
            new = None if _COMPUTED.search(name) else new_name(name)
            if new is None:
                continue
            if new in names:
                raise self.cannot(f"its weights {names[new]} and {name} are for the same place")
            names[new] = name
        return names

    def drop_copies(self, model: Any) -> None:
        """Forget tables of embeddings and logits that are copies of those of `model`, the target."""
        for place, table in (
            ("embed_tokens.weight", model.get_input_embeddings()),
            ("lm_head.weight", model.get_output_embeddings()),
        ):
            weight = getattr(table, "weight", None)
            if weight is None or place not in self.names:
                continue
            tensor = self.checkpoint.tensors[self.names[place]]
            if tensor.shape == weight.shape and torch.equal(tensor.to(weight), weight):
                del self.names[place]

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
        """``[num_tokens]`` the target's ids of the tokens that a head drafts, from the offsets in its ``d2t``.

        ``None`` for a head that drafts all of the target's tokens.

        Raises:
            ConfigError: the ids are missing, not different ones of the target, or not the ones in ``t2d``.
        """
        if "d2t" not in self.names:
            if num_tokens != self.target.vocab_size:
                raise self.cannot(f"it drafts {num_tokens} tokens of {self.target.vocab_size}, and no d2t says which")
            return None
        tensors = self.checkpoint.tensors
        offsets, draftable = tensors[self.names["d2t"]], tensors.get("t2d")
        if tuple(offsets.shape) != (num_tokens,):
            raise self.cannot(f"its d2t has {offsets.numel()} entries, and it drafts {num_tokens} tokens")
        ids = torch.arange(len(offsets)) + offsets.long()
        target_ids = self.target_ids("d2t", ids)
        if draftable is not None:
            drafted = torch.zeros(self.target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
            if not torch.equal(draftable.bool(), drafted):
                raise self.cannot("its d2t and t2d name different tokens")
        return target_ids

    def filled(self, make: Callable[[], Module], names: Mapping[str, str] | None = None) -> Module:
        """The module that `make` gives, with the weights of `names`, by default all; ready for inference.

        Floating point weights get the target's dtype; others keep theirs.

        Raises:
            ConfigError: weights are missing, left over, or have other shapes than the module.
            OutOfMemoryError: the device has no room for them.
        """
        with torch.device("meta"):
            module = make()
        names, device = self.names if names is None else names, self.target.device
        self._check_whole(module, names)
        try:
            state = {name: self._moved(self.checkpoint.tensors[old]) for name, old in names.items()}
            module.load_state_dict(state, assign=True)
            module.to(device)  # buffers that no file holds
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{device} has no room for the trained head {self.checkpoint.path!r}") from error
        return module.eval().requires_grad_(False)

    def _check_whole(self, module: torch.nn.Module, names: Mapping[str, str]) -> None:
        """Refuse files in which a tensor has no place, or a place no tensor."""
        wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        given = {name: tuple(self.checkpoint.tensors[old].shape) for name, old in names.items()}
        wrong = [
            f"{names[name]} ({_shape(given[name])} in place of {_shape(shape)})"
            for name, shape in wanted.items()
            if given.get(name, shape) != shape
        ]
        faults = [
            ("missing", [name for name in wanted if name not in given]),
            ("of another shape than its config and the target say", wrong),
            ("without a place in such a head", [names[name] for name in given if name not in wanted]),
        ]
        if told := [f"{_listed(found)} {'is' if len(found) == 1 else 'are'} {what}" for what, found in faults if found]:
            raise self.cannot(f"of its weights, {'; '.join(told)}")

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, so that the file is not read again whenever memory is short."""
        dtype = self.target.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.target.device, dtype, copy=True)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "a single number"
