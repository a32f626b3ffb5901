"""`TargetModel`: an unmodified Hugging Face causal LM that was probed, and is ready to run ragged steps.

Its attention goes through one registered function, and between two calls the model is left as it was.
"""

from __future__ import annotations

import inspect
import timeit
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, StepPlan
from emssd.data.model_options import ModelOptions
from emssd.errors import CompileError, ConfigError, UnsupportedModelError
from emssd.model.compile.compile_time import expected_seconds
from emssd.model.hf.devices import is_spread, output_device
from emssd.model.hf.finding import find_streams
from emssd.model.hf.interface import (
    ATTENTION_NAME,
    MASKED_NAME,
    Attend,
    Visible,
    implementation,
    keywords_known,
    register,
    with_windows,
)
from emssd.model.hf.invariant import arithmetic_of
from emssd.model.hf.masks import learn_windows
from emssd.model.hf.mixing import install
from emssd.model.hf.probe import layer_devices, probe_layers
from emssd.model.hf.streams import Hidden, Streams, lock_of
from emssd.model.hf.structure import Structure, changed, refuse_training
from emssd.model.hf.support import check_config, check_whole, resolve_max_model_len
from emssd.model.run.parallel import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.compile.compiled import CompiledForward

__all__ = ["Computed", "TargetModel"]

_PAYS = 4  # times as long as compiling: a program saves about half of that, and rows may end before their limit


class Computed(NamedTuple):
    """The results of a pass.

    Attributes:
        logits: ``[b * m, vocab]`` of a whole plan, ``[R, vocab]`` of the wanted rows.
        hidden: by index, see `emssd.model.hf.streams.Streams`, ``[b * n, width]``.
    """

    logits: torch.Tensor
    hidden: Hidden


class TargetModel:
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface, in evaluation mode.
        options: ``max_model_len``, ``compile`` and ``batch_invariant`` count, and ``trust_remote_code`` for its draft
            models; by default it is not compiled. ``compile=True`` warns where it cannot be, and runs the model as it
            is. ``"auto"`` takes a program that an earlier run has left, or compiles one; see `compile_if_it_pays`.
        group: the processes that have a shard of the model each; all of them do this, and every call, together.
        frozen: the model stays as it is, so what is computed from its weights is kept; else it is computed in each run.

    Attributes:
        device: of the logits and of everything that belongs to no layer; `devices` of each layer, if they differ.
        is_spread: whether Accelerate moves what the model computes from device to device.
        layers: shape and rules of each attention layer; of each call, if `counts_calls`, as not all attend once.
        keeps_states: whether layers mix tokens by a recurrence, see `emssd.model.hf.mixing`; of `bytes_per_row`.
        why_compiled: in a line, whether it is compiled, and why.
        may_compile: whether a program that is wanted is compiled if none is kept.
        arithmetic: of every pass that no program runs; ``None`` for PyTorch's own.
        streams: where its hidden states are taken; ``None`` until `prepare_hidden`.
        num_renewals: how often the model was taken as it is then; what was computed from its weights before is old.
        lock: held for a pass, by all that call this model through emssd.

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
        self.is_spread = is_spread(model)
        if options.compile is True and self.is_spread:
            raise ConfigError("model.compile compiles a model on one device; leave it or model.device_map out")
        check_config(model.config, type(model))
        self.group = group or Group()
        if self.group.size == 1:
            check_whole(model)
        refuse_training(model)
        register(model)
        self.model: Any = model  # Transformers' own annotations do not describe how its models are called
        self._frozen = frozen
        self.keeps_states = self.counts_calls = install(model)
        parameters = inspect.signature(type(model).forward).parameters.values()  # the module's own may be wrapped
        self._keywords = {"kwargs" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}
        self.takes_positions = bool({"position_ids", "kwargs"} & self._keywords)
        self.lock = lock_of(model)
        self.max_model_len = resolve_max_model_len(model.config, options.max_model_len)
        self.device: torch.device = output_device(model)
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.arithmetic = arithmetic_of(model, self.device) if options.batch_invariant else None
        self._sink_values: Any = WeakTensorKeyDictionary()  # of each tensor its numbers; it has no annotations
        self._windows: dict[int, int] = {}  # those of layers that do not pass theirs to the attention function
        self.bytes_per_row = self.num_renewals = 0
        self.devices: tuple[torch.device, ...] = ()
        self._program: CompiledForward | None = None
        self._hidden: tuple[int, ...] = ()  # indices of the hidden states that a program gives
        self.streams: Streams | None = None
        self.layers: tuple[LayerSpec, ...] = ()
        self.layers = self._learned()
        self.may_compile, self._num_steps = options.compile, 0
        self.why_compiled = f"not compiled: {'nothing has run yet' if options.compile else 'model.compile=false'}"
        if self.is_spread:
            devices = layer_devices(self)
            self.devices = devices if {*devices} != {self.device} else ()
            self.may_compile, self.why_compiled = False, "not compiled: Accelerate moves it from device to device"
        self._is_untried, self._is_not_kept = bool(self.may_compile), False
        with self.lock:  # passes in other threads replace methods of modules for a while
            self._structure = Structure(model)

    def begin(self) -> int:
        """A run begins. A model that is not frozen is taken as it is now. Returns `num_renewals`.

        Raises:
            UnsupportedModelError: it is in training mode; or it is frozen, and was changed; or see `renew`.
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
            self._sink_values.clear()
            other_code = changed(self._structure.modules, now.modules) is not None
            if other_code or any(layer.sinks is not None for layer in self.layers):
                self._learn_again()
            if self._program is not None and (other_code or not self._program.reread(self)):
                self._compile_again()
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
        """From now on, these hidden states can be asked for; see `emssd.model.hf.streams.Streams` for the indices.

        A compiled program that does not give them is compiled again. Returns where they are taken.

        Raises:
            UnsupportedModelError: with the reason.
        """
        self.streams = self.streams or find_streams(self)
        self.streams.check(indices)
        if not {*indices} <= {*self._hidden}:
            self._hidden = tuple(sorted({*self._hidden, *indices}))
            if self._program is not None:
                self._compile_again()
        return self.streams

    @property
    def num_layers(self) -> int:
        """Decoder layers; those of `layers`, and those that keep a state."""
        return int(self.model.config.get_text_config().num_hidden_layers)

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
            elif plan.compile is not None:
                run = plan.compile(self, indices)
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

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        logits_to_keep: torch.Tensor | int = 0,
        *,
        masks: dict[int, Visible] | None = None,
        hidden: Hidden | None = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Call the model with `attend` in the place of its attention. Returns logits ``[b, m, vocab]``.

        Given `masks`, the model makes its masks too, and it is filled with the function behind that of each layer. The
        keys of `hidden` say which hidden states are wanted, see `Streams`; it is filled with these, ``[b, n, width]``.
        Given `num_layers`, only so many of the first layers are run. `streams` is wanted for both.
        """
        if self.is_spread and isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = logits_to_keep.tolist()  # type: ignore[assignment]  # which indexes on any device
        keywords: dict[str, Any] = {"emssd_attend": with_windows(self._apart(attend), self._windows)}
        keywords |= {} if masks is None else {"emssd_masks": masks}
        calls = count() if self.counts_calls else None
        taking = self.streams.taken(hidden) if self.streams is not None and hidden else nullcontext()
        cut = self.streams.cut(num_layers) if self.streams is not None and num_layers is not None else nullcontext()
        arithmetic = None if torch.compiler.is_compiling() else self.arithmetic
        # PyTorch has no grouped matrix product of float64, nor one that is the same in any batch.
        in_loops = self.dtype is torch.float64 or arithmetic is not None
        with (
            self.lock,
            implementation(ATTENTION_NAME if masks is None else MASKED_NAME, experts_in_loops=in_loops),
            keywords_known(keywords | {"emssd_numbers": self._values_of, "emssd_calls": calls}),
            taking,
            cut,
            nullcontext() if arithmetic is None else arithmetic,
        ):
            output = self.call(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                **({} if self.is_spread else keywords),  # Accelerate would pass on copies; they are known as it is
            )
        logits: torch.Tensor = output.logits
        if "logits_to_keep" in self._keywords or isinstance(logits_to_keep, int):
            return logits
        return logits if logits.shape[1] == len(logits_to_keep) else logits[:, logits_to_keep]

    def call(self, **keywords: Any) -> Any:
        """Call the model with those of `keywords` that it takes."""
        takes_all = "kwargs" in self._keywords
        return self.model(**{name: value for name, value in keywords.items() if takes_all or name in self._keywords})

    def _apart(self, attend: Attend) -> Attend:
        """`attend`, which has its own arithmetic."""
        if self.arithmetic is None or torch.compiler.is_compiling():
            return attend

        def attend_apart(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return attend(layer, seen, *qkv)

        return attend_apart

    def _values_of(self, sinks: torch.Tensor) -> tuple[float, ...]:
        """The numbers of ``sinks [heads]``, read once: on a GPU, the host waits for it."""
        if (values := self._sink_values.get(sinks)) is None:
            values = self._sink_values[sinks] = tuple(sinks.detach().flatten().tolist())
        return values  # type: ignore[no-any-return]  # the dictionary has no annotations

    @property
    def why_not_invariant(self) -> str | None:
        """In words, why the bits of a row may depend on its batch, attention apart; ``None`` if they do not."""
        if self.compiled is not None:
            return self.compiled.why_not_invariant
        if self.arithmetic is None:
            return "model.batch_invariant=false"
        if self.keeps_states:
            return "some of its layers keep a state"
        missed = sorted(self.arithmetic.missed)
        return f"it calls {', '.join(missed)}" if missed else None

    @property
    def compiled(self) -> CompiledForward | None:
        """The program that runs in the place of `run`, or ``None``; see `compile`."""
        self.compile()
        return self._program

    def compile(self) -> None:
        """Take or make the program that `options` ask for, unless that was tried. An engine does so last of all, when
        no drafter was refused.
        """
        if self._is_untried:
            self._is_untried = False
            self._program = self._compile()
            if self._is_not_kept and self._num_steps:
                self.compile_if_it_pays(self._num_steps)

    def compile_if_it_pays(self, num_steps: int) -> None:
        """With ``compile="auto"`` and no program kept, compile one if `num_steps` steps take long enough.

        Between runs only: a program rounds otherwise than the model, and each run has one arithmetic.
        """
        self._num_steps = num_steps
        if self._is_untried or not self._is_not_kept:
            return
        from emssd.model.compile.fingerprint import short_pass

        seconds = min(timeit.repeat(lambda: short_pass(self, self.run), number=1, repeat=3))
        if num_steps * seconds < _PAYS * expected_seconds(len(self.layers)):
            few = f"not compiled: {num_steps:,} steps at most are too few to pay for it"
            self.why_compiled = f"{few}; model.compile=true does it once, for all later runs"
            return
        self.may_compile = True
        self._program = self._compile(requested=False)
        self.num_renewals += 1  # it rounds otherwise than what computed the KV of prefixes

    def _compile_again(self) -> None:
        self._program = None  # first, as a program holds weights of its own
        self._program = self._compile()

    @torch.inference_mode(False)  # for the key of a program, which has what is traced outside of it
    def _compile(self, *, requested: bool = True) -> CompiledForward | None:
        """A program; ``None`` where there can be none, with a warning if it was `requested`."""
        from emssd.model.compile.compiled import CompiledForward, NotKeptError

        only_kept, self._is_not_kept = self.may_compile == "auto", False
        try:
            if self.counts_calls:
                raise CompileError("some of its layers keep a state, or attend twice, which no compiled program does")
            compiled = CompiledForward(self, self._hidden, only_kept=only_kept)
            if self.arithmetic is not None and (why := compiled.why_not_invariant) is not None:
                raise CompileError(f"model.batch_invariant=true, and {why}")
        except CompileError as error:
            self._is_not_kept = isinstance(error, NotKeptError)
            self.why_compiled = f"not compiled: {error}"
            if requested and not only_kept:
                warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None
        self.why_compiled = f"compiled: {compiled.origin}"
        return compiled


def _without_sinks(layers: Seq[LayerSpec]) -> list[LayerSpec]:
    return [replace(layer, sinks=None if layer.sinks is None else ()) for layer in layers]


_NOTHING = torch.empty(0)  # in the place of hidden states that are not computed yet
