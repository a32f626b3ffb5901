"""The forward pass of recorded steps, compiled by Inductor: one for all their sizes, with attention as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch

from emssd.model.compile.fingerprint import named_tensors
from emssd.model.compile.linears import join_products
from emssd.model.compile.program import handle_of
from emssd.model.compile.tracing import Traced, export
from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.interface import Attend
from emssd.model.hf.streams import Hidden
from emssd.model.hf.tripwire import Structure, changed

__all__ = ["Compile", "CompiledPasses", "compiled"]

Compile = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], Callable[..., tuple[torch.Tensor, ...]]]
"""Makes a program of a `Traced` module and example inputs, for inputs with any number of tokens."""

_ROUNDINGS = 8  # of the largest value; Inductor adds in another order, and each layer passes on what was rounded


def compiled(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], backend: str = "inductor"
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A `Compile`: the `backend` of `torch.compile` makes one program for one token, and one for all other numbers.

    Inductor rounds wherever the module does, also between operations that it fuses.
    """
    with torch.inference_mode(False), torch.no_grad():
        join_products(traced := export(module, inputs).module())
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if backend == "inductor" else None
    return torch.compile(traced, fullgraph=True, dynamic=True, backend=backend, options=options)


class CompiledPasses:
    """The compiled forward passes of one model, by the hidden states that they give.

    A pass that cannot be compiled, or that computes something else, runs as it is from then on, with a warning.
    """

    def __init__(self, compile: Compile = compiled) -> None:
        self._compile = compile
        self._forwards: dict[tuple[int, ...], _Forward] = {}
        self._recording: str | None = None

    @contextmanager
    def checked(self, recording: str) -> Iterator[None]:
        """Within, each compiled pass is compared with the model's own, and the host waits. `recording` is a title."""
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None

    def forget(self) -> None:
        """Drop the programs of a model that has other tensors or modules by now."""
        self._forwards = {hidden: forward for hidden, forward in self._forwards.items() if forward.is_current()}

    def __call__(self, target: HookedModel, hidden: Seq[int]) -> Callable[..., torch.Tensor]:
        """See `emssd.attention.StepPlan.compile`."""
        if target.arithmetic is not None or target.counts_calls:
            return target.run
        key = tuple(hidden)
        if key not in self._forwards:
            self._forwards[key] = _Forward(target, key, self._compile)
        forward = self._forwards[key]
        return target.run if forward.has_failed else forward if self._recording is None else self._check(forward)

    def _check(self, forward: _Forward) -> Callable[..., torch.Tensor]:
        def run(*inputs: Any, hidden: Hidden) -> torch.Tensor:
            name = type(forward.target.model).__name__
            states = dict(hidden)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of PyTorch about its own code
                    outputs = [forward(*inputs, hidden=states), *states.values()]
                why = None
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # tracing and compiling raise almost anything
                why = f"{type(error).__name__}: {error}"
            logits = forward.target.run(*inputs, hidden=hidden)
            if why is None:
                most = max(map(_roundings, outputs, [logits, *hidden.values()]))
                why = None if most <= _ROUNDINGS else f"it differs by {most:.3g} roundings, and {_ROUNDINGS} may be"
            if why is not None:
                forward.has_failed = True
                warnings.warn(
                    f"{name} is recorded without Inductor, from {self._recording} on: {why}. "
                    f"backend.fused_kernels=false does not try",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return logits

        return run


def _roundings(values: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference where `expected` is finite, in roundings of its largest value; infinite for NaN."""
    wide = torch.promote_types(expected.dtype, torch.float32)  # of the largest step, they take half a gigabyte
    is_finite, wanted = expected.isfinite(), expected.to(wide).nan_to_num(0.0, 0.0, 0.0)
    largest = wanted.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    far = torch.where(is_finite, values.to(wide) - wanted, 0.0).abs().nan_to_num(float("inf")).max()
    return float(far / largest) / torch.finfo(expected.dtype).eps


class _Forward:
    """A compiled `TargetModel.run`, which reads the model's own tensors. It is compiled when it is first called.

    Attributes:
        has_failed: the model's own is to be run. The program stays, as recordings that were checked may run it.
    """

    def __init__(self, target: HookedModel, hidden: tuple[int, ...], compile: Compile) -> None:
        self.target, self.has_failed = target, False
        self._hidden, self._compile, self._layers = hidden, compile, target.layers
        self._structure, self._tensors = Structure(target.model).modules, self._tensors_now()
        self._program: Callable[..., tuple[torch.Tensor, ...]] | None = None
        self._attend: Attend | None = None
        self._handle = handle_of(self)

    def _tensors_now(self) -> dict[str, tuple[Any, ...]]:
        return {name: (one, one.data_ptr()) for name, one in named_tensors(self.target.model).items()}

    def is_current(self) -> bool:
        """Whether the model consists of the same tensors and modules, whose values may be others."""
        same_modules = changed(self._structure, Structure(self.target.model).modules) is None
        return same_modules and changed(self._tensors, self._tensors_now()) is None

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, kept: torch.Tensor, *, hidden: Hidden
    ) -> torch.Tensor:
        if self._program is None:
            tokens = torch.arange(24, device=self.target.device)  # as many as no dimension of a model has
            example = tokens.unsqueeze(0) % self.target.vocab_size, tokens.unsqueeze(0), tokens, self._handle
            self._program = self._compile(Traced(self.target, self._hidden, torch.ops.emssd.attend.default), example)
        self._attend = attend
        try:
            logits, *states = self._program(ids, positions, kept, self._handle)
        finally:
            self._attend = None
        hidden.update(zip(self._hidden, states, strict=True))
        return logits

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Called by the program in place of attention."""
        assert self._attend is not None, "attention outside of a pass"
        return self._attend(layer, self._layers[layer], query, key, value)
