"""`TargetModel`: a causal LM that was probed, is owned or borrowed, and is ready to run ragged steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, StepPlan
from emssd.data.model_options import ModelOptions
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model.compile.compilable import CompilableModel
from emssd.model.hf.device_map import is_spread, output_device
from emssd.model.hf.find_streams import find_streams
from emssd.model.hf.masks import learn_windows
from emssd.model.hf.probe import layer_devices, probe_layers
from emssd.model.hf.refusals import check_config, check_whole
from emssd.model.hf.streams import Hidden
from emssd.model.hf.tripwire import Structure, changed, refuse_training
from emssd.model.run.parallel import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Computed", "TargetModel"]


class Computed(NamedTuple):
    """The results of a pass.

    Attributes:
        logits: ``[b * m, vocab]`` of a whole plan, ``[R, vocab]`` of the wanted rows.
        hidden: by index, see `emssd.model.hf.streams.Streams`, ``[b * n, width]``.
    """

    logits: torch.Tensor
    hidden: Hidden


class TargetModel(CompilableModel):
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface, in evaluation mode.
        options: ``max_model_len``, ``compile`` and ``batch_invariant`` count, and ``trust_remote_code`` for its draft
            models; by default it is not compiled. ``compile=True`` warns where it cannot be, and runs the model as it
            is. ``"auto"`` takes a program that an earlier run has left, or compiles one; see `compile_if_it_pays`.
        group: the processes that have a shard of the model each; all of them do this, and every call, together.
        frozen: the engine owns the model and keeps what it computes from the weights; else each run computes it anew.

    Attributes:
        devices: of each layer, if they differ.

    Raises:
        UnsupportedModelError: with the reason, if its output would not be that of the model; or it is in training mode.
        ConfigError: ``max_model_len`` beyond the model's limit, or ``compile`` is something else.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: ModelOptions | None = None,
        *,
        group: Group | None = None,
        frozen: bool = False,
    ) -> None:
        self.options = options = options or ModelOptions(compile=False)
        options.check()
        if options.compile is True and is_spread(model):
            raise ConfigError("model.compile compiles a model on one device; leave it or model.device_map out")
        check_config(model.config, type(model))
        self.group, self._frozen = group or Group(), frozen
        if self.group.size == 1:
            check_whole(model)
        refuse_training(model)
        super().__init__(model, options)
        self.layers = self._learned()
        self.devices: tuple[torch.device, ...] = ()
        if self.is_spread and {*(devices := layer_devices(self))} != {self.device}:
            self.devices = devices
        with self.lock:  # passes in other threads replace methods of modules for a while
            self._structure = Structure(model)

    def begin(self) -> int:
        """A run begins. A model that is not frozen is taken as it is now. Returns `num_renewals`.

        Raises UnsupportedModelError: it is in training mode; or it is frozen, and was changed; or see `renew`.
        """
        refuse_training(self.model)
        if not self._frozen:
            self.renew()
            return self.num_renewals
        with self.lock:
            before, now = self._structure, Structure(self.model)
        if (change := changed(before.modules, now.modules) or changed(before.tensors, now.tensors)) is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} was changed ({change}), and this engine keeps what it computed from the "
                f"weights before; call engine.refresh()"
            )
        return self.num_renewals

    def _learned(self, *, prove: bool = True) -> tuple[LayerSpec, ...]:
        """The layers as the model runs now, with the windows that masks alone know of. Without `prove`, not checked."""
        counted, self._windows = self.counts_calls, {}
        self._windows = learn_windows(self)
        layers = probe_layers(self, prove=prove)
        return layers if self.counts_calls == counted else self._learned(prove=prove)  # windows by other numbers

    @torch.inference_mode(False)  # for the key of a program, which has what is traced outside of it
    def renew(self) -> None:
        """Take the model as it is now. Raises UnsupportedModelError: its KV cache cannot serve it any more."""
        kind = self.model.dtype, output_device(self.model), self.model.config.get_text_config().vocab_size
        if kind != (self.dtype, self.device, self.vocab_size):
            raise UnsupportedModelError(
                f"the model is in {kind[0]} on {kind[1]} with {kind[2]} tokens now, and this engine was made for "
                f"{self.dtype} on {self.device} with {self.vocab_size}; make the engine again"
            )
        with self.lock:
            now = Structure(self.model)
            self._sink_values.clear()
            other_code = changed(self._structure.modules, now.modules) is not None
            if other_code or any(layer.sinks is not None for layer in self.layers):
                self._learn_again(prove=other_code)  # values of sinks prove nothing else
            if self._program is not None and (other_code or not self._program.reread()):
                self._compile_again()
            self.num_renewals += 1
            self._structure = now

    def _learn_again(self, *, prove: bool) -> None:
        windows, self._windows = self._windows, {}
        try:
            layers = self._learned(prove=prove)
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

    def kv_cache_spec(self, max_batch_size: int) -> KVCacheSpec:
        """The KV cache that this model needs for batches of up to `max_batch_size` rows."""
        return KVCacheSpec(
            self.layers,
            self.dtype,
            self.device,
            max_batch_size,
            self.max_model_len,
            bytes_per_row=self.bytes_per_row,
            devices=self.devices,
        )

    def __call__(
        self,
        plan: StepPlan,
        backend: AttentionBackend,
        indices: Seq[int] = (),
        num_layers: int | None = None,
        program: Callable[..., torch.Tensor] | None = None,
    ) -> Computed:
        """Run one step. Gives logits of the wanted rows only, and the hidden states `indices` of all fed tokens.

        With `num_layers`, only so many of the first layers are run, uncompiled, after `prepare_hidden`. Otherwise
        `program` runs in the place of the model's own.
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
            elif (chosen := program or (self.compiled if self._is_untried else self._program)) is not None:
                run = partial(chosen, step=backend.native_step(plan))
            elif plan.compile is not None:
                run = plan.compile(self, indices)
            hidden = dict.fromkeys(indices, _NOTHING)
            logits = run(plan.input_ids, plan.position_ids, attend, plan.logits_to_keep, hidden=hidden)
            logits = logits.to(self.device).flatten(0, 1)
            if plan.landing is not None:
                plan.landing.copy_(logits.argmax(dim=-1), non_blocking=True)
            return Computed(logits, {index: states.flatten(0, 1).to(self.device) for index, states in hidden.items()})

        with self.lock:
            logits, hidden = forward() if plan.replay is None else plan.replay(forward)
        assert hidden.keys() >= {*indices}, "this step was recorded before these hidden states were asked for"
        return Computed(logits if plan.logit_index is None else logits[plan.logit_index], hidden)


def _without_sinks(layers: Seq[LayerSpec]) -> list[LayerSpec]:
    return [replace(layer, sinks=None if layer.sinks is None else ()) for layer in layers]


_NOTHING = torch.empty(0)  # in the place of hidden states that are not computed yet
