"""Where the hidden states of a model are taken: its residual streams, found by its structure and proved by a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import UnsupportedModelError
from emssd.model.probe import ProbeRows, running
from emssd.model.replaced import only_here, replaced_forward

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = ["NORMED", "Hidden", "Streams"]

NORMED = -1
"""The index of the last hidden state behind the model's final norm."""

Hidden = dict[int, torch.Tensor]
"""Hidden states by index, see `Streams`."""


class Streams:
    """The places of a model where hidden states are taken, by forward hooks that are there for one pass only.

    Index ``k`` is the residual stream in front of decoder layer ``k``: 0 is what the first layer gets, and ``n`` of
    ``n`` layers is what the last one gives, before the final norm. `NORMED` is what comes out behind that norm.
    ``hidden_states`` of Transformers has it in the place of index ``n``.

    Args:
        target: the model. One short pass of it proves that its layers hand one residual stream on to each other.

    Attributes:
        decoder: the module that owns the layers.
        layers: these.
        tail: the modules that make `NORMED` of index ``n``, in order; ``None`` if it is something else that does.
        output_type: what `decoder` returns.
        first: ``[1, n, width]`` index 0 in that pass, of the tokens `ids` ``[n]``.

    Raises:
        UnsupportedModelError: with the reason.
    """

    def __init__(self, target: HookedModel) -> None:
        self._name = type(target.model).__name__
        self.decoder, self.layers = _found(target.model)
        self._changed: frozenset[int] = frozenset()  # indices whose tensors the model writes to later in its pass
        self._gives_more = False  # a layer gives something beside the stream
        self._prove(target)

    @property
    def num_layers(self) -> int:
        """Decoder layers ``n``; indices go from 0 to ``n``."""
        return len(self.layers)

    def check(self, indices: Seq[int]) -> None:
        """Hold `indices` to what there is.

        Raises:
            UnsupportedModelError: the model has not so many layers.
        """
        if beyond := [index for index in indices if not NORMED <= index <= self.num_layers]:
            raise UnsupportedModelError(
                f"a drafter asks for hidden states {beyond[0]}, and {self._name} has {self.num_layers} layers; choose "
                f"0 (what the first layer gets) to {self.num_layers} (what the last one gives), or {NORMED} (what the "
                f"LM head is given)"
            )

    @contextmanager
    def taken(self, into: Hidden) -> Iterator[None]:
        """A pass of the model within this fills `into`, ``[b, n, width]``; its keys are the indices that are wanted."""

        def take(index: int) -> Callable[[torch.Tensor], None]:
            def keep(states: torch.Tensor) -> None:
                into[index] = states.clone() if index in self._changed else states

            return keep

        with self._heard({index: take(index) for index in into}):
            yield

    def check_cut(self) -> None:
        """Hold the model to what `cut` needs.

        Raises:
            UnsupportedModelError: its layers give more than the residual stream.
        """
        if self._gives_more:
            raise UnsupportedModelError(
                f"{self._name} lends drafters no first layers: its layers give more than a residual stream"
            )

    @contextmanager
    def cut(self, num_layers: int) -> Iterator[None]:
        """A pass of the model within this ends early: layers behind the first `num_layers` hand on what they get."""
        with ExitStack() as cuts:
            for layer in self.layers[num_layers:]:
                cuts.enter_context(replaced_forward(layer, _handed_on))
            yield

    @contextmanager
    def _heard(self, listeners: dict[int, Callable[[torch.Tensor], None]]) -> Iterator[None]:
        """Within, each index is told to its listener."""
        with ExitStack() as hooks:
            for index, listener in listeners.items():
                if index == 0:
                    hook = _before(self.layers[0], listener)
                else:
                    module = self.decoder if index == NORMED else self.layers[index - 1]
                    hook = _behind(module, _first_output(listener))
                hooks.callback(hook.remove)
            yield

    def _prove(self, target: HookedModel) -> None:
        """Run two short sequences, and see that each layer is given what the one before it gave."""
        rows, calls, behind = ProbeRows(target), list[tuple[str, int, torch.Tensor, torch.Tensor]](), list[_Call]()

        def note(kind: str, index: int) -> Callable[[torch.Tensor], None]:
            return lambda states: calls.append((kind, index, states, states.clone()))

        with ExitStack() as hooks, target.lock, running(target):
            for index, layer in enumerate(self.layers):
                hooks.callback(_before(layer, note("given to", index)).remove)
                hooks.callback(_behind(layer, self._note_more).remove)
            for module in _outside(self.decoder, self.layers):
                hooks.callback(_behind(module, _noted_in(behind)).remove)
            hooks.callback(_behind(self.decoder, self._note_type).remove)
            hooks.enter_context(self._heard({k + 1: note("given by", k) for k in range(self.num_layers)}))
            hooks.enter_context(self._heard({NORMED: note("given by", self.num_layers)}))
            rows.run_packed(target, rows.attend)
        expected = [(kind, k) for k in range(self.num_layers) for kind in ("given to", "given by")]
        if [(kind, index) for kind, index, *_ in calls] != [*expected, ("given by", self.num_layers)]:
            raise self._refused("its layers do not run once each, one after another")
        for one, other in pairwise(calls[1:-1]):
            if one[0] == "given by" and not torch.equal(one[3], other[3]):
                raise self._refused(f"layer {other[1]} is not given what layer {one[1]} gave")
        if any(states.ndim != 3 or states.shape[:2] != (1, rows.num_tokens) for _, _, states, _ in calls):
            raise self._refused("its layers hand on more than one residual stream")
        self.ids, self.first = rows.tokens, calls[0][3]
        kept = [(0, *calls[0][2:])] + [(k + 1, *call[2:]) for k, call in enumerate(calls[1:-1:2])]
        self._changed = frozenset(index for index, states, before in kept if not torch.equal(states, before))
        self.tail = _way(behind, calls[-2][2], calls[-1][2])

    def _note_type(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self.output_type = type(output)

    def _note_more(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self._gives_more |= not isinstance(output, torch.Tensor)

    def _refused(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._name} gives drafters no hidden states: {reason}")


_Call = tuple[torch.nn.Module, torch.Tensor, torch.Tensor]
"""A module, what it was given, and what it gave."""


def _found(model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The module that owns the decoder layers, and these: the ``k``-th of a list holds the attention of layer ``k``."""
    config: Any = model.config
    expected, found = config.get_text_config().num_hidden_layers, list[tuple[torch.nn.Module, list[torch.nn.Module]]]()
    for owner in model.modules():
        for each in owner.children():
            layers = list(each.children()) if isinstance(each, torch.nn.ModuleList) else []
            if len(layers) == expected and all(map(_holds_layer, layers, range(expected))):
                found.append((owner, layers))
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives drafters no hidden states: it has {len(found)} lists of {expected} modules "
            f"that could be its decoder layers"
        )
    return found[0]


def _holds_layer(module: torch.nn.Module, index: int) -> bool:
    return any(getattr(each, "layer_idx", None) == index for each in module.modules())


def _outside(decoder: torch.nn.Module, layers: Seq[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules of `decoder` that are no part of its layers, without itself."""
    inside = {decoder, *(each for layer in layers for each in layer.modules())}
    return [module for module in decoder.modules() if module not in inside]


def _way(calls: Seq[_Call], start: torch.Tensor, end: torch.Tensor) -> list[torch.nn.Module] | None:
    """The modules that led from `start` to `end`, each given what the one before it gave."""
    way, now = list[torch.nn.Module](), start
    for module, given, gave in calls:
        if not _same(now, end) and _same(given, now):
            way.append(module)
            now = gave
    return way if _same(now, end) else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that are both alive are one, or the same elements in another shape."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.numel() == other.numel())


def _before(module: torch.nn.Module, listener: Callable[[torch.Tensor], None]) -> Any:
    """A hook of this thread, which hears the residual stream that `module` is called with."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        listener(_handed_on(*arguments, **keywords))

    return module.register_forward_pre_hook(only_here(hook, _ignored), with_kwargs=True)


def _behind(module: torch.nn.Module, hook: Callable[..., None]) -> Any:
    """A hook of this thread, which hears what `module` gives."""
    return module.register_forward_hook(only_here(hook, _ignored))


def _handed_on(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """The residual stream that a layer is called with."""
    stream: torch.Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return stream


def _first_output(listener: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        listener(output if isinstance(output, torch.Tensor) else output[0])

    return hook


def _ignored(*_: Any) -> None:
    """What a hook does in other threads."""


def _noted_in(calls: list[_Call]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if arguments and isinstance(output, torch.Tensor):
            calls.append((module, arguments[0], output))

    return hook
