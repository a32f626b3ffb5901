"""`TargetModel`: a Hugging Face causal LM that was probed, and is ready to run ragged steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from emssd.attention import AttentionBackend, LayerSpec, StepPlan
from emssd.errors import CompileError, ConfigError, UnsupportedModelError
from emssd.model.finding import find_streams
from emssd.model.hooked import HookedModel
from emssd.model.masks import learn_windows
from emssd.model.probe import layer_devices, probe_layers
from emssd.model.spread import is_spread, output_device
from emssd.model.streams import Hidden, Streams
from emssd.model.structure import Structure, changed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.compiled import CompiledForward
    from emssd.model.parallel import Group

__all__ = ["Compile", "Computed", "TargetModel"]

Compile = bool | Literal["auto"]
"""Whether a model is compiled: yes, no, or where that costs nothing or pays; see `TargetModel.compile_if_it_pays`."""

_ALIKE = {
    torch.nn.Linear,
    torch.nn.Embedding,
    torch.nn.Identity,
    torch.nn.SiLU,
    torch.nn.GELU,
    torch.nn.ReLU,
    torch.nn.Tanh,
}
"""Modules that compute the same in training mode, so that a new one need not be told."""

_PAYS = 4  # times as long as compiling: a program saves about half of that, and rows may end before their limit


class Computed(NamedTuple):
    """The results of a pass.

    Attributes:
        logits: ``[b * m, vocab]`` of a whole plan, ``[R, vocab]`` of the wanted rows.
        hidden: by index, see `emssd.model.streams.Streams`, ``[b * n, width]``.
    """

    logits: torch.Tensor
    hidden: Hidden


class TargetModel(HookedModel):
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface. Between two calls it is left as it was.
        max_model_len: longest sequence to allow; ``None`` takes the model's own limit.
        compile: run the forward pass as one compiled program, see `emssd.model.compiled`. Where that cannot be, a
            warning says why, and the model runs as it is. ``"auto"`` takes a program that an earlier run has left, and
            leaves the rest to `compile_if_it_pays`.
        group: the processes that have a shard of the model each; all of them do this, and every call, together.
        frozen: the model stays as it is, so what is computed from its weights is kept; else it is computed in each run.
        batch_invariant: what no program computes has the same bits in any batch, see `emssd.model.invariant`. On CPUs.

    Attributes:
        compiled: that program, or ``None``.
        why_compiled: in a line, whether it is compiled, and why.
        may_compile: whether a program that is wanted is compiled if none is kept: ``False`` with ``compile=False``.
        num_renewals: how often the model was taken as it is then; what was computed from its weights before is old.

    Raises:
        UnsupportedModelError: with the reason, if its output would not be that of the model.
        ConfigError: `max_model_len` beyond the model's limit, or `compile` is something else.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        compile: Compile = False,
        group: Group | None = None,
        frozen: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        if compile is True and is_spread(model):
            raise ConfigError("model.compile compiles a model on one device; leave it or model.device_map out")
        if compile not in (True, False, "auto"):
            raise ConfigError(f"model.compile is {compile}; it must be true, false or auto")
        super().__init__(model, max_model_len=max_model_len, group=group, batch_invariant=batch_invariant)
        self.layers = self._learned()
        self.may_compile, self._can_compile = compile, False
        self.why_compiled = "not compiled: model.compile=false"
        if self.is_spread:
            devices = layer_devices(self)
            self.devices = devices if {*devices} != {self.device} else ()
            self.may_compile, self.why_compiled = False, "not compiled: Accelerate moves it from device to device"
        self.compiled = self._compile() if self.may_compile else None
        self.num_renewals = 0
        self._frozen = frozen
        with self.lock:  # passes in other threads replace methods of modules for a while
            self._structure = Structure(model)

    def begin(self) -> int:
        """A run begins. A model that is not frozen is taken as it is now. Returns `num_renewals`.

        Raises:
            UnsupportedModelError: it is in training mode; or it is frozen, and was changed; or see `renew`.
        """
        name = type(self.model).__name__
        trained = [
            part for part, module in self.model.named_modules() if module.training and type(module) not in _ALIKE
        ]
        if trained:
            part = f" in {trained[0]}" if trained[0] else ""
            raise UnsupportedModelError(
                f"{name} is in training mode{part}, where dropout draws at random; call model.eval()"
            )
        if not self._frozen:
            self.renew()
        elif (change := self._change()) is not None:
            raise UnsupportedModelError(
                f"{name} was changed ({change}), and this engine keeps what it computed from the weights before; call "
                f"engine.refresh()"
            )
        return self.num_renewals

    def _change(self) -> str | None:
        with self.lock:
            before, now = self._structure, Structure(self.model)
        return changed(before.modules, now.modules) or changed(before.tensors, now.tensors)

    def _learned(self) -> tuple[LayerSpec, ...]:
        """The layers as the model runs now, with the windows that masks alone know of."""
        counted, self._windows = self.counts_calls, {}
        self._windows = learn_windows(self)
        layers = probe_layers(self)
        return layers if self.counts_calls == counted else self._learned()  # windows by other numbers

    @torch.inference_mode(False)  # for the key of a program, which has what is traced outside of it
    def renew(self) -> None:
        """Take the model as it is now: what was computed from its weights is computed again.

        Raises:
            UnsupportedModelError: its KV cache cannot serve it any more.
        """
        kind = self.model.dtype, output_device(self.model), self.model.config.get_text_config().vocab_size
        if kind != (self.dtype, self.device, self.vocab_size):
            raise UnsupportedModelError(
                f"the model is in {kind[0]} on {kind[1]} with {kind[2]} tokens now, and this engine was made for "
                f"{self.dtype} on {self.device} with {self.vocab_size}; make the engine again"
            )
        with self.lock:
            now = Structure(self.model)
            self._sinks.clear()
            other_code = changed(self._structure.modules, now.modules) is not None
            if other_code or any(layer.sinks is not None for layer in self.layers):
                self._learn_again()
            if self.compiled is not None and (other_code or not self.compiled.reread(self)):
                hidden, self.compiled = self.compiled.hidden, None  # first, as a program holds weights of its own
                self.compiled = self._compile(hidden)
            self.num_renewals += 1
            self._structure = now

    def _learn_again(self) -> None:
        windows, self._windows = self._windows, {}
        try:
            layers = self._learned()
            if _without_sinks(layers) != _without_sinks(self.layers):
                raise UnsupportedModelError(
                    "the model attends by other rules now than those that the KV cache of this engine was made for; "
                    "make the engine again"
                )
        except BaseException:
            self._windows = windows
            raise
        self.layers = layers
        self.streams = None if self.streams is None else find_streams(self)

    def prepare_hidden(self, indices: Seq[int]) -> Streams:
        """From now on, these hidden states can be asked for; see `emssd.model.streams.Streams` for the indices.

        A compiled program that does not give them is compiled again. Returns where they are taken.

        Raises:
            UnsupportedModelError: with the reason.
        """
        self.streams = self.streams or find_streams(self)
        self.streams.check(indices)
        if self.compiled is not None and not {*indices} <= {*(given := self.compiled.hidden)}:
            self.compiled = None  # first, as a program holds weights of its own
            self.compiled = self._compile(tuple(sorted({*given, *indices})))
        return self.streams

    def __call__(
        self,
        plan: StepPlan,
        backend: AttentionBackend,
        indices: Seq[int] = (),
        num_layers: int | None = None,
        program: Callable[..., torch.Tensor] | None = None,
    ) -> Computed:
        """Run one step. Gives logits of the wanted rows only, and the hidden states `indices` of all fed tokens.

        Given `num_layers`, only so many of the first layers are run, uncompiled. `prepare_hidden` comes before that.
        Else `program` runs, in the place of the model's own.
        """

        def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            if seen != self.layers[layer]:
                raise UnsupportedModelError(
                    f"layer {layer} changed its attention from {self.layers[layer]} to {seen} while running; "
                    f"emssd serves models whose layers attend by fixed rules"
                )
            return backend.forward(plan, layer, *qkv)

        def forward() -> Computed:
            run: Callable[..., torch.Tensor] = self.run
            if num_layers is not None:
                run = partial(self.run, num_layers=num_layers)
            elif (chosen := program or self.compiled) is not None:
                run = partial(chosen, step=backend.native_step(plan))
            hidden = dict.fromkeys(indices, _NOTHING)
            logits = run(plan.input_ids, plan.position_ids, attend, plan.logits_to_keep, hidden=hidden)
            logits = logits.to(self.device).flatten(0, 1)
            if plan.landing is not None:
                plan.landing.copy_(logits.argmax(dim=-1), non_blocking=True)
            return Computed(logits, {index: each.flatten(0, 1).to(self.device) for index, each in hidden.items()})

        with self.lock:
            logits, hidden = forward() if plan.replay is None else plan.replay(forward)
        assert hidden.keys() >= {*indices}, "this step was recorded before these hidden states were asked for"
        return Computed(logits if plan.logit_index is None else logits[plan.logit_index], hidden)

    def compile_if_it_pays(self, num_steps: int) -> None:
        """After ``compile="auto"`` found no program: compile one now, if `num_steps` steps take long enough.

        Between runs only: a program rounds otherwise than the model, and each run has one arithmetic.
        """
        if self.may_compile != "auto" or self.compiled is not None or not self._can_compile:
            return
        from emssd.model.fingerprint import short_pass
        from emssd.model.tracing import expected_seconds

        passes = []
        for _ in range(3):
            start = time.perf_counter()
            short_pass(self, self.run)
            passes.append(time.perf_counter() - start)
        seconds = num_steps * min(passes)
        if seconds < _PAYS * expected_seconds(len(self.layers)):
            few = f"not compiled: {num_steps:,} steps at most are too few to pay for it"
            self.why_compiled = f"{few}; model.compile=true does it once, for all later runs"
            return
        self.may_compile = True
        self.compiled = self._compile(asked_for=False)
        self.num_renewals += 1  # it rounds otherwise than what computed the KV of prefixes

    def _compile(self, hidden: tuple[int, ...] = (), *, asked_for: bool = True) -> CompiledForward | None:
        """A program; ``None`` where there can be none, with a warning if it was `asked_for`."""
        from emssd.model.compiled import CompiledForward, NotKeptError

        only_kept, self._can_compile = self.may_compile == "auto", False
        try:
            if self.counts_calls:
                raise CompileError("some of its layers keep a state, or attend twice, which no compiled program does")
            compiled = CompiledForward(self, hidden, only_kept=only_kept)
            if self.arithmetic is not None and (why := compiled.why_not_invariant) is not None:
                raise CompileError(f"model.batch_invariant=true, and {why}")
        except CompileError as error:
            self._can_compile = isinstance(error, NotKeptError)
            self.why_compiled = f"not compiled: {error}"
            if asked_for and not only_kept:
                warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None
        self.why_compiled = f"compiled: {compiled.origin}"
        return compiled


def _without_sinks(layers: Seq[LayerSpec]) -> list[LayerSpec]:
    return [replace(layer, sinks=None if layer.sinks is None else ()) for layer in layers]


_NOTHING = torch.empty(0)  # in the place of hidden states that are not computed yet
