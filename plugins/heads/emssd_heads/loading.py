"""`HeadFiles`: a published head for a target; `TargetWeights`: the parts that it borrows; `Loaded`: a head."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafting import DrafterContext
from emssd.errors import ConfigError, OutOfMemoryError
from emssd.model import BorrowedTarget
from emssd_heads.config import TargetSizes
from emssd_heads.files import Checkpoint, cannot_load, read_checkpoint
from emssd_heads.formats import Format, expect, unwrapped
from emssd_heads.head import Head

__all__ = ["HeadFiles", "Loaded", "TargetWeights"]

Module = TypeVar("Module", bound=torch.nn.Module)

logger = logging.getLogger("emssd")

_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # older versions stored what is computed


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Module]):
    """A trained head.

    Attributes:
        head: with its weights.
        layers: the target's hidden states that it reads, see `emssd_heads.LAST_NORMED`.
        described: the conventions of its files, a line each.
        prefix: a layer between hidden states and `head`.
    """

    head: Module
    layers: tuple[int, ...]
    described: tuple[str, ...]
    prefix: Head | None = None


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The parts of a target that a drafter with a head borrows, see `DrafterContext`.

    Attributes:
        target: with embeddings and a vocabulary projection.
        sizes: of the target.
        spec: of its KV cache.
        make_cache: gives the head's KV cache.
        compile: whether target and head run as compiled programs.
        drafter: name of the drafter.
    """

    target: BorrowedTarget
    sizes: TargetSizes
    spec: KVCacheSpec
    make_cache: Callable[[KVCacheSpec], AttentionBackend]
    compile: bool = False
    drafter: str = ""

    @classmethod
    def by(cls, context: DrafterContext, drafter: str) -> TargetWeights:
        """The parts that `context` lends to the `drafter` of this name. Raises ConfigError: there is no model."""
        target, spec, make_cache = context.target, context.cache_spec, context.make_cache
        if target is None or spec is None or make_cache is None:
            raise ConfigError(
                f"drafter={drafter} reads hidden states of the target, and there is no model to take them of"
            )
        sizes = TargetSizes(context.vocab_size, target.hidden_size, target.num_layers, target.dtype, target.device)
        return cls(target, sizes, spec, make_cache, target.is_compiled, drafter)

    def loaded(self, path: str | None, load: Callable[[str, TargetSizes], Loaded[Module]]) -> Loaded[Module]:
        """The head at `path` that `load` gives for the target; its description is logged.

        Raises:
            ConfigError: the option ``path`` is not given, or the head cannot be loaded.
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
    """The files of a trained head for a target.

    Attributes:
        names: of the checkpoint's tensors, by the names of the module's parameters.
    """

    checkpoint: Checkpoint
    target: TargetSizes
    names: dict[str, str]

    @classmethod
    def read(
        cls, path: str, target: TargetSizes, *formats: Format, new_name: Callable[[str], str | None] = str
    ) -> HeadFiles:
        """Read the folder, file of weights or hub id `path`, which holds a head of one of `formats`.

        See `renamed` for `new_name`; by default, the module has the names of the files.

        Raises:
            ConfigError: they cannot be read, or hold something else.
        """
        checkpoint = read_checkpoint(path)
        expect(checkpoint, *formats)
        files = cls(unwrapped(checkpoint), target, {})
        files.names = files.renamed(new_name)
        return files

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of ``config.json``."""
        return self.checkpoint.config

    def cannot(self, why: str) -> ConfigError:
        """The error for this head, for the reason `why`."""
        return cannot_load(self.checkpoint.path, why)

    def renamed(self, new_name: Callable[[str], str | None]) -> dict[str, str]:
        """The names of the tensors by their new ones; ``None`` drops a tensor.

        Raises:
            ConfigError: two tensors have the same new name.
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
        tables = {"embed_tokens.weight": model.get_input_embeddings(), "lm_head.weight": model.get_output_embeddings()}
        for name, table in tables.items():
            weight, old = getattr(table, "weight", None), self.names.get(name)
            if weight is not None and old is not None:
                tensor = self.checkpoint.tensors[old]
                if tensor.shape == weight.shape and torch.equal(tensor.to(weight), weight):
                    del self.names[name]

    def check_sizes(self, hidden_size: object, vocab_size: object) -> None:
        """Raises ConfigError: a size, if the config has it, is not the target's."""
        if hidden_size not in (None, self.target.hidden_size):
            raise self.cannot(
                f"it has a hidden size of {hidden_size}, and the target's is {self.target.hidden_size}; it was trained "
                f"for another target"
            )
        if vocab_size not in (None, self.target.vocab_size):
            raise self.cannot(f"its vocabulary has {vocab_size} tokens, and the target's has {self.target.vocab_size}")

    def target_ids(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """``ids [draft_vocab_size]`` from the tensor `name`. Raises ConfigError: no different ids of the target."""
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
        """The module that `make` gives, with the weights of `names`, by default all but ids; ready for inference.

        Floating point weights get the target's dtype.

        Raises:
            ConfigError: weights are missing, left over, or have other shapes than the module.
            OutOfMemoryError: the device has no room for them.
        """
        with torch.device("meta"):
            module = make()
        if names is None:
            names = {name: old for name, old in self.names.items() if name not in ("d2t", "t2d")}
        self._check_whole(module, names)
        device = self.target.device
        try:
            state = {}
            for name, old in names.items():
                tensor = self.checkpoint.tensors[old]
                dtype = self.target.dtype if tensor.is_floating_point() else tensor.dtype
                state[name] = tensor.to(device, dtype, copy=True)  # or memory that is short has the file read again
            module.load_state_dict(state, assign=True)
            module.to(device)  # buffers that no file holds
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{device} has no room for the trained head {self.checkpoint.path!r}") from error
        return module.eval().requires_grad_(False)

    def _check_whole(self, module: torch.nn.Module, names: Mapping[str, str]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        stored = {name: tuple(self.checkpoint.tensors[old].shape) for name, old in names.items()}
        wrong = [
            f"{names[name]} ({_shape(stored[name])} in place of {_shape(shape)})"
            for name, shape in shapes.items()
            if stored.get(name, shape) != shape
        ]
        faults = {
            "missing": [name for name in shapes if name not in stored],
            "of another shape than its config and the target say": wrong,
            "without a place in such a head": [names[name] for name in stored if name not in shapes],
        }
        texts = [f"{_listed(bad)} {'is' if len(bad) == 1 else 'are'} {fault}" for fault, bad in faults.items() if bad]
        if texts:
            raise self.cannot(f"of its weights, {'; '.join(texts)}")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "a single number"
