"""One pass of layers that keep a state: the paths of tokens through it, and what is computed along them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from emssd.native import load_kernels, why_unavailable

__all__ = ["Path", "Paths", "Recurrence", "StatePass"]


class Recurrence(NamedTuple):
    """A state ``S`` of a matrix for each head: ``S = exp(decay * rates) * S + key ⊗ u`` and ``y = query · S``.

    There ``u`` is `value`; or, with `beta`, ``beta * (value - key · (exp(decay * rates) * S))``: the delta rule
    (Yang et al. 2024, arXiv 2406.06484, gated in 2412.06464). Without `beta`, it is a state space model (Gu and Dao
    2023, arXiv 2312.00752, and 2024, 2405.21060).

    Attributes:
        query, key: ``[n, heads, k]`` for the fed tokens.
        value: ``[n, heads, v]``.
        decay: ``[n, heads, k or 1, v or 1]``, the logarithm of the factor of the state.
        beta: ``[n, heads]``, or ``None``.
        rates: ``[k, v]``, or ``None`` for ones.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None = None
    rates: torch.Tensor | None = None


@dataclass(slots=True)
class Path:
    """Tokens of one row from a state to the end of a branch.

    Attributes:
        slot: the state that it starts from; -1 for zeros.
        inputs: for each token, the index of its inputs in this pass.
        outputs: for each token, its index among the fed ones; -1 if another path or an earlier step computes it.
        save: after so many tokens the state goes to `save_slot`; 0 for never.
        shared: length of the common beginning with the path before, in the same row.
    """

    slot: int
    inputs: list[int]
    outputs: list[int]
    save: int = 0
    save_slot: int = -1
    shared: int = 0


@dataclass(slots=True)
class Paths:
    """All paths of a pass. Its inputs are the carried ones, and then the new ones, row by row.

    Attributes:
        carried: indices of kept inputs among those of the latest pass.
        places: for each new token, in the order of inputs, its index among the fed ones.
        paths: row by row, branches of a tree in the order of a walk through it.
        parents: for each input, the index of the token before; -1 before the first.
    """

    carried: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of all paths, ``[2, length]`` inputs and outputs, and ``[paths, 6]`` the paths, for the kernel."""
        if self._tables is None:
            ends = [*accumulate(len(path.inputs) for path in self.paths)]
            inputs = chain.from_iterable(path.inputs for path in self.paths)
            outputs = chain.from_iterable(path.outputs for path in self.paths)
            paths = [
                [path.slot, end - len(path.inputs), end, path.save, path.save_slot, path.shared]
                for path, end in zip(self.paths, ends, strict=True)
            ]
            self._tables = torch.tensor([[*inputs], [*outputs]]), torch.tensor(paths)
        return self._tables


class StatePass:
    """Computes, in one pass, what the functions of `install` are called for. Its changes are adopted if the pass ends.

    Args:
        carried: ``[tokens, numbers]`` the inputs of each layer in the latest pass, in the order of calls.
        states: ``[slots, heads, k, v]`` of each layer that has one, by its place in that order.
        history: how many tokens before the newest convolutions see.
        num_slots: slots that each layer needs.
    """

    def __init__(
        self, step: Paths, carried: Seq[torch.Tensor], states: Mapping[int, torch.Tensor], history: int, num_slots: int
    ) -> None:
        self._step, self._carried, self._num_slots = step, carried, num_slots
        self.inputs: list[torch.Tensor] = []
        self.states, self.history = dict(states), history
        self._indices: dict[str | int, torch.Tensor] = {}  # by name, or by the size of a convolution

    def convolve(self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A causal convolution of each channel: ``y[i] = bias + sum_j weight[:, j] * x[i - (k - 1) + j]``.

        Args:
            values: ``[n, channels]`` for the fed tokens.
            weight: ``[channels, k]``.
            bias: ``[channels]``, or ``None``.

        Returns:
            ``[n, channels]`` in the dtype of the weight.
        """
        size, dtype, wide = weight.shape[-1], weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        self.history = max(self.history, size - 1)
        out = torch.zeros_like(values, dtype=wide)
        values, weight = self._with_carried(values), weight.to(wide)
        padded = torch.cat([values, values.new_zeros(1, values.shape[1])]).to(wide)
        windows = self._index(size, values.device)
        mixed = padded[windows[:, 0]] * weight[:, 0]
        for tap in range(1, size):
            mixed = mixed + padded[windows[:, tap]] * weight[:, tap]
        if bias is not None:
            mixed = mixed + bias.to(wide)
        out[self._index("places", out.device)] = mixed
        return out.to(dtype)

    def recur(self, inputs: Recurrence) -> torch.Tensor:
        """``[n, heads, v]``."""
        query, key, value, decay, beta, rates = inputs
        parts = [key, value, decay, *([] if beta is None else [beta])]
        shapes, (heads, num_keys, num_values) = [part.shape[1:] for part in parts], (*key.shape[1:], value.shape[-1])
        layer = len(self.inputs)
        kept = self._with_carried(torch.cat([part.flatten(1) for part in parts], 1))
        sizes = [shape.numel() for shape in shapes]
        slots = self._slots_of(layer, kept.new_zeros(0, heads, num_keys, num_values))
        if slots.device.type == "cpu" and why_unavailable() is None:
            tables, rates = self._step.tables(), rates if rates is None else rates.contiguous()
            out: torch.Tensor = load_kernels().recur(kept, query.contiguous(), slots, rates, *tables, *decay.shape[2:])
            return out
        paths = sorted(self._step.paths, key=lambda path: -len(path.inputs))
        starts = torch.tensor([path.slot for path in paths], device=kept.device)
        state = slots[starts.clamp_min(0)].masked_fill((starts < 0)[:, None, None, None], 0)
        out = torch.zeros_like(value)
        for at in range(len(paths[0].inputs)):
            active = [path for path in paths if at < len(path.inputs)]
            inputs_now = torch.tensor([path.inputs[at] for path in active], device=kept.device)
            split = torch.split(kept[inputs_now], sizes, 1)
            key, value, decay, *rest = (part.view(-1, *shape) for part, shape in zip(split, shapes, strict=True))
            now = state[: len(active)]
            now = now * (decay if rates is None else decay * rates).exp()
            if rest:
                value = (value - (now * key[..., None]).sum(2)) * rest[0][..., None]
            now = now + key[..., None] * value[:, :, None]
            state[: len(active)] = now
            wanted = [(row, path.outputs[at]) for row, path in enumerate(active) if path.outputs[at] >= 0]
            if wanted:
                rows, outputs = torch.tensor(wanted, device=kept.device).unbind(1)
                out[outputs] = (now[rows] * query[outputs][..., None]).sum(2)
            for row, path in enumerate(active):
                if path.save == at + 1:
                    slots[path.save_slot] = now[row]
        return out

    def carry_the_rest(self) -> None:
        """Keep the inputs of layers that a draft leaves out, with zeros for the draft's tokens, which are dropped."""
        num_new = len(self._step.places)
        for old in self._carried[len(self.inputs) :]:
            carried = old[self._index("carried", old.device)] if self._step.carried else old[:0]
            self.inputs.append(torch.cat([carried, old.new_zeros(num_new, old.shape[1])]))

    def _with_carried(self, values: torch.Tensor) -> torch.Tensor:
        """The inputs of this layer for all tokens of the step, the carried ones first."""
        layer, new = len(self.inputs), values[self._index("places", values.device)]
        if self._step.carried:
            carried = self._index("carried", values.device)
            new = torch.cat([self._carried[layer][carried], new])
        self.inputs.append(new)
        return new

    def _slots_of(self, layer: int, none: torch.Tensor) -> torch.Tensor:
        """The states of a layer, enlarged to the slots that this pass needs; at first there are `none`."""
        state = self.states.get(layer, none)
        if len(state) < self._num_slots:
            state = torch.cat([state, state.new_zeros(self._num_slots - len(state), *state.shape[1:])])
        self.states[layer] = state
        return state

    def _index(self, key: str | int, device: torch.device) -> torch.Tensor:
        """``carried`` or ``places`` of the step, or the windows of a convolution of a size; one for all layers."""
        if (index := self._indices.get(key)) is None or index.device != device:
            index = self._windows(key) if isinstance(key, int) else torch.tensor(getattr(self._step, key))
            index = self._indices[key] = index.to(device)
        return index

    def _windows(self, size: int) -> torch.Tensor:
        """``[nnz, size]`` for each new token, the indices of its ancestors' inputs and its own; -1 before the first."""
        step = self._step
        windows = [torch.tensor([*range(len(step.carried), len(step.parents))])]  # no arange, which a probe replaces
        parents = torch.tensor([*step.parents, -1])
        for _ in range(size - 1):
            windows.append(parents[windows[-1]])
        return torch.stack(windows[::-1], 1)
