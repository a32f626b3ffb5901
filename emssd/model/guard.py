"""`Guard`: whether a model is still the one that an engine was made for; asked when a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from emssd.attention import LayerSpec
from emssd.errors import UnsupportedModelError
from emssd.model.fingerprint import named_tensors
from emssd.model.probe import ProbeRows, running
from emssd.native import load_kernels, why_unavailable

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = ["Guard", "checksums"]

_ODD = 6364136223846793005
_OFFSETS = 4096


class Guard:
    """Remembers a model as it is now: where its tensors lie, their bytes, its config, and what its code computes.

    The code is run on a few tokens, the canary. There, a linear layer with a weight of the model gives numbers that
    depend on its input, its bias and on which weight it is, but does not read the weight: the checksums do. It is run
    twice at first, to learn whether it gives the same bits again.
    """

    def __init__(self, target: HookedModel) -> None:
        self._rows = ProbeRows(target)
        self._places, tensors = _look(target)
        self._sums, self._config = checksums([*tensors.values()]), _config(target)
        self._reads_weights, self._pattern = False, _pattern(target)
        try:
            self._canary = self._run_canary(target)
            self._reads_weights = not bool(self._canary[1].isfinite().all())
        except UnsupportedModelError:  # code that looks at its weights, say
            self._reads_weights = True
        if self._reads_weights:
            self._canary = self._run_canary(target)
        self._noise = (self._canary[1] - self._run_canary(target)[1]).abs().max()

    def change(self, target: HookedModel) -> str | None:
        """The part of `target` that has changed, or ``None``. Raises UnsupportedModelError: it runs no more."""
        places, tensors = _look(target)
        if places != self._places:
            changed = (name for name, place in places.items() if self._places.get(name) != place)
            return next(changed, "a tensor that is gone")
        if (sums := checksums([*tensors.values()])) != self._sums:
            changed = (name for name, *pair in zip(tensors, sums, self._sums, strict=False) if pair[0] != pair[1])
            return next(changed) if len(sums) == len(tensors) else "its weights"
        if _config(target) != self._config:
            return "its config"
        (layers, logits), (known_layers, known) = self._run_canary(target), self._canary
        same = torch.equal(_bytes(logits), _bytes(known))
        same |= bool(0 < self._noise >= (logits - known).abs().max() / 4)
        return None if same and layers == known_layers else "what its modules compute"

    def _run_canary(self, target: HookedModel) -> tuple[dict[int, LayerSpec], torch.Tensor]:
        """The attention of each layer, and logits ``[2, vocab]`` on the host: of the last token of each of two rows."""
        rows, layers = self._rows, dict[int, LayerSpec]()
        last = torch.stack([(rows.owner == row).nonzero()[-1, 0] for row in range(2)])

        def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            layers[layer] = seen
            return rows.attend(layer, seen, *qkv)

        drawn = _random_state(target.device)
        weights = () if self._reads_weights else target.model.parameters()
        with target.plainly(), running(target), _Linears(weights, self._pattern):
            logits = target.run(rows.tokens[None], rows.positions[None], attend, last)[0].cpu()
        if not torch.equal(_random_state(target.device), drawn):
            raise UnsupportedModelError(
                f"{type(target.model).__name__} draws random numbers, as dropout in training mode; call model.eval()"
            )
        return layers, logits


class _Linears(TorchFunctionMode):
    """Computes linear layers with `weights` without reading these: a product of rank one for each, of a `pattern`."""

    def __init__(self, weights: Iterable[torch.Tensor], pattern: torch.Tensor) -> None:
        super().__init__()
        self._offsets = {id(weight): 97 * place % _OFFSETS for place, weight in enumerate(weights) if weight.ndim == 2}
        self._pattern = pattern

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and (offset := self._offsets.get(id(args[1]))) is not None:
            source, (num_outputs, num_inputs) = args[0], args[1].shape
            pattern = self._pattern.to(source)
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            mean = (source * pattern[offset : offset + num_inputs]).sum(-1, keepdim=True) / num_inputs**0.5
            out = mean * pattern[offset + 1 : offset + 1 + num_outputs]
            return out if bias is None else out + bias
        return func(*args, **(kwargs or {}))


def _look(target: HookedModel) -> tuple[dict[str, tuple[Any, ...]], dict[str, torch.Tensor]]:
    """By each name where its tensor lies, and how; and the tensors to be read, each by one of its names."""
    named = named_tensors(target.model).items()
    every = {f"{name}{part}": each for name, tensor in named for part, each in _parts(tensor)}
    places = {name: _place(each) for name, each in every.items()}
    return places, {name: every[name] for name in {place: name for name, place in places.items()}.values()}


def _pattern(target: HookedModel) -> torch.Tensor:
    """Numbers from -1 to 1 without a visible order, more than a weight has rows or columns."""
    widest = max((max(each.shape) for each in target.model.parameters() if each.ndim == 2), default=0)
    numbers = torch.arange(1, widest + _OFFSETS + 1, dtype=torch.float64).sqrt().mul(977).sin()
    return numbers.to(target.device, target.dtype)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _config(target: HookedModel) -> str:
    return str(target.model.config.to_dict())


def checksums(tensors: Seq[torch.Tensor]) -> list[int]:
    """Of the bytes of `tensors`: one for each on a CPU with our kernels, else one for each device."""
    if all(tensor.device.type == "cpu" for tensor in tensors) and why_unavailable() is None:
        sums: list[int] = load_kernels().checksums([tensor.detach() for tensor in tensors]).tolist()
        return sums
    devices = dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta)
    return [_checksum([each for each in tensors if each.device == device], device) for device in devices]


@torch.no_grad()
def _checksum(tensors: Seq[torch.Tensor], device: torch.device) -> int:
    """One of all bytes in their order, in PyTorch: a polynomial of the words in each of many lanes."""
    lanes = torch.arange(1 << (16 if device.type == "cpu" else 20), device=device)
    odd = lanes * (2 * _ODD) + 1
    for tensor in tensors:
        words = _bytes(tensor)
        if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
            words = words.view(torch.int32)  # in lanes of 64 bits, so that a pair of flipped signs does not cancel
        for piece in torch.split(words, len(lanes)):
            part = lanes[: len(piece)]
            torch.add(piece, part, alpha=_ODD, out=part)
    return int((lanes * odd).sum())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or those that one of a class of its own is made of, as quantized ones are."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from ((f".{name}{part}", each) for part, each in _parts(getattr(tensor, name)))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    pointer = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return pointer, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
