"""`HiddenStates` of the target, which drafters with `Drafter.hidden_layers` get."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from emssd.attention.packed import on_device
from emssd.errors import DraftError

__all__ = ["HiddenStates", "checked_layers"]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the tokens that a step computed and kept, ragged: row ``i`` has ``indptr[i]:indptr[i + 1]``.

    The rows are the batch, and rows that computed a piece of their prompt. A row's tokens come in order, each once, and
    none that was rejected: `starts` is where its latest delivery ended, or 0 for a row that begins, or begins anew
    after `Drafter.release`. Its newest token is not among them, as the target has not seen it yet. (A row that an
    EOS has just cut may have it.)

    Attributes:
        request_ids: ``[P]``.
        starts: ``[P]`` the position of each row's first token in its sequence.
        indptr: ``[P + 1]`` host integers with a leading zero.
        layers: the indices of `states`, see `Drafter.hidden_layers`.
        states: for each of `layers` a tensor ``[n, width]`` on the target's device, in its dtype. They may be kept, and
            are not to be written to.
        places: ``[n]`` where the tokens are in `states`, in the engine; ``None`` in what a drafter gets: they are all.
    """

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    indptr: tuple[int, ...]
    layers: tuple[int, ...]
    states: tuple[torch.Tensor, ...]
    places: tuple[int, ...] | None = None

    def rows(self) -> Iterator[tuple[str, int, tuple[torch.Tensor, ...]]]:
        """Request id, position of the first token, and the states ``[n_i, width]`` of each layer, row after row."""
        for name, start, (begin, end) in zip(self.request_ids, self.starts, pairwise(self.indptr), strict=True):
            yield name, start, tuple([states[begin:end] for states in self.states])

    def of(self, layers: Seq[int]) -> HiddenStates:
        """The states of `layers`, in this order, in tensors of their own."""
        states = tuple([self.states[self.layers.index(layer)] for layer in layers])
        if self.places is not None:
            index = on_device(self.places, states[0].device) if states else None
            states = tuple([layer[index] for layer in states])
        return replace(self, layers=tuple(layers), states=states, places=None)


def checked_layers(layers: object) -> tuple[int, ...]:
    """`Drafter.hidden_layers` as it should be. Raises DraftError: it is something else."""
    if not isinstance(layers, (tuple, list)) or not all(type(layer) is int and layer >= -1 for layer in layers):
        raise DraftError(
            f"its hidden_layers are {layers!r}; give a tuple of integers: 0 for what the target's first layer gets, "
            f"n for what its n-th layer gives, -1 for what its LM head is given"
        )
    if len(set(layers)) < len(layers):
        raise DraftError(f"its hidden_layers are {layers!r}; give each once")
    return tuple(layers)
