"""Runs a model before it is served, to learn its layers' shapes and rules, and to prove that it can be packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from emssd.attention import Kept, LayerSpec, StepMask, masked_attention
from emssd.errors import UnsupportedModelError
from emssd.model.hf.batch_invariance import Audit
from emssd.model.hf.differing_module import differing_module
from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.interface import Attend, Visible, implementation
from emssd.model.hf.recurrent_states import RowTokens, StateCache

__all__ = ["PROBE_TOLERANCE", "ProbeRows", "layer_devices", "look_at_layers", "probe_layers", "running"]

# Largest difference of logits, in standard deviations of the logits, between a packed run and the model's own. A
# feature that is lost or sequences that see each other move logits by about one; rounding stays far below. Many models
# compute softmax or norms in float32 whatever their dtype, so float64 has room for that.
PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}
_LENGTHS = (5, 8)  # of the rows of the probe; their sum is no size that models have


def probe_layers(target: HookedModel, *, prove: bool = True) -> tuple[LayerSpec, ...]:
    """Run two short sequences packed into one, and learn and prove how the model attends.

    The packed run records every layer's shapes and rules. Its logits must be those of the model's own eager attention
    for each sequence alone: so no layer keeps a state, positions are taken from ``position_ids``, and every feature
    reaches the attention function. Raises UnsupportedModelError with the reason. Without `prove`, only learn.
    """
    model, name = target.model, type(target.model).__name__
    rows = ProbeRows(target)
    layers: dict[int, LayerSpec] = {}

    def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        if layer in layers:
            raise _CalledTwiceError
        layers[layer] = seen
        return rows.attend(layer, seen, *qkv)

    with running(target):
        audit = nullcontext() if target.arithmetic is None else Audit(target.arithmetic)
        with _Aranges(rows.num_tokens) as aranges, audit:
            try:
                packed = rows.run_packed(target, attend)
            except _CalledTwiceError:
                target.counts_calls = True
                layers.clear()
                packed = rows.run_packed(target, attend)
        if not prove:
            return tuple(layers[layer] for layer in sorted(layers))
        with implementation("eager", experts_in_loops=target.dtype is torch.float64):
            alone = torch.cat([rows.run_one_alone(target, row) for row in range(2)])
    expected = len(layers) if target.counts_calls else model.config.get_text_config().num_hidden_layers
    if sorted(layers) != list(range(expected)):
        raise UnsupportedModelError(
            f"{name} sends {len(layers)} of its {expected} layers through the attention interface; "
            f"the others keep a state of their own, which cannot be rolled back"
        )
    _compare(target, packed, alone)
    if target.keeps_states:
        _probe_states(target)
    if aranges.num_calls:
        _refuse_counted_positions(target, rows)
    return tuple(layers[layer] for layer in range(expected))


class _CalledTwiceError(Exception):
    """A layer attends more than once in a pass."""


def layer_devices(target: HookedModel) -> tuple[torch.device, ...]:
    """The device on which each layer attends, as a short pass shows."""
    return tuple(device for _, (_, device) in sorted(look_at_layers(target).items()))


def look_at_layers(
    target: HookedModel, masks: dict[int, Visible] | None = None
) -> dict[int, tuple[LayerSpec, torch.device]]:
    """Each layer's rules and device, in a run of two tokens. `masks` are those of `HookedModel.run`."""
    layers: dict[int, tuple[LayerSpec, torch.device]] = {}

    def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        layers[layer] = seen, qkv[0].device
        return qkv[0].new_zeros(*qkv[0].shape[:2], qkv[2].shape[2])

    tokens = torch.tensor([[3 % target.vocab_size, 14 % target.vocab_size]], device=target.device)
    with running(target):
        numbers = torch.arange(2, device=target.device)
        target.run(tokens, numbers.unsqueeze(0), attend, numbers, masks=masks)
    return layers


def _probe_states(target: HookedModel) -> None:
    """Decode a row in steps of several sizes, with drafts that are rejected, and compare with one pass over its text.

    Two sequences that can be packed prove nothing about tokens that follow a state.
    """
    tokens = [(7 * index + 2) % target.vocab_size for index in range(13)]
    states, cache, logits = StateCache(), dict[int, list[torch.Tensor]](), list[torch.Tensor]()
    start = 0

    def attend(layer: int, seen: LayerSpec, query: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
        old = cache.get(layer, [part[:0] for part in new])
        key, value = cache[layer] = [torch.cat([past[:start], part]) for past, part in zip(old, new, strict=True)]
        indices = torch.arange(len(key), device=query.device)
        bias = StepMask(indices[None, start:], indices).additive(seen.sliding_window, query)
        return masked_attention(query[None], key[None], value[None], bias, seen)[0]

    with running(target):
        for size, num_drafts in ((6, 0), (1, 3), (4, 2), (2, 0)):
            new = tokens[start : start + size] + tokens[:num_drafts]
            ids, indices = torch.tensor([new], device=target.device), torch.arange(len(new), device=target.device)
            with states.pass_of({"": RowTokens(tuple(range(len(new))), start + len(new), num_drafts)}):
                logits.append(target.run(ids, indices[None] + start, attend, indices)[0, :size])
            start += size
            states.commit(Kept(("",), (start,)))
        with implementation("eager", experts_in_loops=target.dtype is torch.float64):
            alone = target.call(input_ids=torch.tensor([tokens], device=target.device), use_cache=False).logits[0]
    _compare(target, torch.cat(logits), alone)


def _refuse_counted_positions(target: HookedModel, rows: ProbeRows) -> None:
    """Refuse a model whose logits change where `torch.arange` gives it the true positions of its tokens.

    Such a model counts the tokens of a call, which may only matter far beyond a short probe. Experts are run in loops,
    as grouped ones count tokens to sort them.
    """
    with running(target), implementation(experts_in_loops=True):
        packed = rows.run_packed(target, rows.attend)
        with _Aranges(rows.num_tokens, rows.positions):
            moved = rows.run_packed(target, rows.attend)
        if torch.equal(moved, packed):
            return
        again = rows.run_packed(target, rows.attend)  # some kernels of GPUs add up in another order each time
    noise, change = ((logits - packed).abs().max() for logits in (again, moved))
    if not change <= 4 * noise:
        raise UnsupportedModelError(
            f"{type(target.model).__name__} counts the tokens of a call where it needs their positions, which matters "
            f"in sequences of {target.max_model_len} tokens"
        )


@contextmanager
def running(target: HookedModel) -> Iterator[None]:
    """Turns a model's failure into a sentence: no kernel for this dtype or device, inputs beyond tokens, no memory."""
    try:
        with torch.inference_mode():
            yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # code of models raises anything
        raise UnsupportedModelError(
            f"{type(target.model).__name__} does not run in {target.dtype} on {target.device} from token ids and "
            f"positions: {error}"
        ) from error


class ProbeRows:
    """Two sequences whose tokens alternate in the pack, so that indices in it are no positions.

    The first begins at position 0. The positions of the second go up to the `longest` sequence, beyond any threshold.
    """

    def __init__(self, target: HookedModel, longest: int | None = None) -> None:
        longest, device = min(longest or target.max_model_len, target.max_model_len), target.device
        lengths = [min(length, longest) for length in _LENGTHS]
        # Half of each row is one token, so that it goes to the same experts wherever routing is by token.
        self.rows = [
            [(11 * max(i - length // 2, 0) + 5 * row + 3) % target.vocab_size for i in range(length)]
            for row, length in enumerate(lengths)
        ]
        far = [max(i, round(longest ** (i / (lengths[1] - 1))) - 1) for i in range(lengths[1])]
        pack = sorted((i, row) for row, length in enumerate(lengths) for i in range(length))
        self.num_tokens = len(pack)
        self.tokens = torch.tensor([self.rows[row][i] for i, row in pack], device=device)
        self.positions = torch.tensor([far[i] if row else i for i, row in pack], device=device)
        self.kept = torch.arange(len(pack), device=device)  # all, in the form of a step's `logits_to_keep`
        self.index, self.owner = torch.tensor(pack, device=device).unbind(1)
        self._mask = StepMask(self.index[None], self.index, (self.owner[:, None] != self.owner)[None])

    def attend(self, layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        """Each row's attention, in the pack."""
        query, key, value = (part[None] for part in qkv)
        bias = self._mask.additive(seen.sliding_window, query)
        return masked_attention(query, key, value, bias, seen)[0].contiguous()

    def run_packed(self, target: HookedModel, attend: Attend) -> torch.Tensor:
        """Logits ``[n, vocab]`` of the first row, and then of the second."""
        owners, states = self.owner.tolist(), StateCache()
        indices = [tuple(i for i, owner in enumerate(owners) if owner == row) for row in range(2)]
        feeds = {str(row): RowTokens(fed, len(fed), 0) for row, fed in enumerate(indices)}
        with states.pass_of(feeds) if target.keeps_states else nullcontext():
            logits = target.run(self.tokens.unsqueeze(0), self.positions.unsqueeze(0), attend, self.kept)[0]
        target.bytes_per_row = states.bytes_per_row
        return torch.cat([logits[self.owner == row] for row in range(2)])

    def run_one_alone(self, target: HookedModel, row: int) -> torch.Tensor:
        """The same from the model itself for one row: as anybody would call it, or the second with its positions."""
        ids, keywords = self.tokens[self.owner == row].unsqueeze(0), dict[str, torch.Tensor]()
        if row == 1 and target.takes_positions:
            keywords["position_ids"] = self.positions[self.owner == 1].unsqueeze(0)
            # It hides nothing; without one, Transformers takes steps of several positions for other sequences.
            keywords["attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = target.call(input_ids=ids, use_cache=False, **keywords).logits[0]
        return logits


class _Aranges(TorchFunctionMode):
    """Counts calls of `torch.arange` for `count` numbers, which are taken for positions; they return `instead`."""

    def __init__(self, count: int, instead: torch.Tensor | None = None) -> None:
        super().__init__()
        self.num_calls = 0
        self._count, self._instead = count, instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.arange or result.numel() != self._count:
            return result
        self.num_calls += 1
        return result if self._instead is None else self._instead.to(result)


def _compare(target: HookedModel, packed: torch.Tensor, alone: torch.Tensor) -> None:
    packed, alone = packed.double(), alone.double()
    difference = float((packed - alone).abs().max() / alone.std().clamp_min(1e-12))
    if difference <= PROBE_TOLERANCE[target.precision]:
        return
    name = type(target.model).__name__
    if torch.is_autocast_enabled(target.device.type):
        reason = "cannot be served under torch.autocast, which rounds in other places for other shapes; leave its block"
    elif not alone.isfinite().all():
        stored = ((key, part) for key, part in target.model.named_parameters() if 0 not in part.stride())  # not packed
        weights = (key for key, part in stored if not part.isfinite().all())
        reason = f"gives logits that are not finite: {next(weights, 'a layer')} has NaN or infinite values"
    else:
        reason = (
            f"gives other logits when sequences are packed into one row (difference {difference:.3g} standard "
            "deviations): it has a feature that does not go through its attention function"
        )
        if (module := differing_module(target, ProbeRows(target), PROBE_TOLERANCE[target.precision])) is not None:
            reason += f": {module} mixes tokens, or counts them; decode it with its own generate"
    raise UnsupportedModelError(f"{name} {reason}")
