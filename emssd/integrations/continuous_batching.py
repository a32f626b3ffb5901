"""`speculate`: Transformers' continuous batching (``model.generate_batch`` and its servers), decoded by an engine.

All that touches the private parts of ``transformers.generation.continuous_batching`` stands here. The manager is
Transformers' own, with its thread, queues and statuses; an engine takes the place of its batch processor.

`SpeculativeManager` is what ``model.init_continuous_batching(…)`` gives; docs/how_to/generate_batch.md uses it. A
request may have options of its own: ``add_request(ids, sampling=SamplingParams(…), stop=["\\n"])``.

- ``sampling`` replaces the generation config. The request is sampled as if it were alone, and has the text of
  ``Engine.generate([ids], sampling=sampling)``.
- ``stop`` has texts that end it; they and a grammar need the ``tokenizer`` of `speculate`.
- ``temperature``, ``top_k`` and ``top_p``, as in Transformers, change these alone.

The texts of ``n`` samples (or ``num_return_sequences``) are delivered each by itself, as
``f"{request_id}__child#{sample}"``, and the last one as ``request_id``. A request that cannot be decoded fails alone:
``output.error`` has the sentence. ``cancel_request(request_id)`` ends all of its samples.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import dataclass, replace
from queue import Queue
from threading import Event, Lock
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from transformers import __version__
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api as api
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import drain_queue

from emssd.decoding.engine import Engine
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.errors import ConfigError, PluginError
from emssd.integrations.generate_options import check_config, sampling_of
from emssd.integrations.kept_engine import KeptEngine, base_of
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request, Row, StopStrings

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["Speculation", "SpeculativeManager", "SpeculativeOutput", "speculate"]

_CACHED, _OURS = "_cached_continuous_batching_manager", "init_continuous_batching"  # what a model has here for a while
_NOT_HERE = frozenset({"min_length", "min_new_tokens", "max_time"})  # which `generate` makes processors and criteria of
_OPTIONS = ("sampling", "stop", "temperature", "top_k", "top_p")  # of one request
_BATCH_SIZE = 32  # by default
_CHILD = "__child#"  # names the samples of a request but the last
_PLAIN = SamplingParams(temperature=0.0)


class Speculation(KeptEngine, AbstractContextManager["Speculation"]):
    """Decodes ``model.generate_batch`` and ``model.init_continuous_batching`` with an engine: the same tokens, faster.

    It lasts until `close`, or to the end of a ``with`` block. ``emssd.speculate`` is its name.

    The engine is made when a manager first starts, and lives as long as this, so that a drafter may remember texts.
    Whenever a manager starts, it takes the model as it is then, in evaluation mode.

    Args:
        model: also with a LoRA adapter of PEFT.
        tokenizer: the model's, for stop strings, grammars, and drafters that compare vocabularies.
        drafter, backend, budget: as in `Engine.from_model`.
        frozen: you promise not to change the model, so that a start takes no time.
        options: as in `Engine.from_model`; ``batch_size`` is 32 by default.

    Attributes:
        engine: ``None`` before the first start.

    Raises:
        ConfigError: an option that cannot be, the model decodes so already, or Transformers is too old.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        frozen: bool = False,
        **options: Any,
    ) -> None:
        if not hasattr(api.BackgroundThreadStatus, "pause_and_wait"):
            raise ConfigError(f"emssd.speculate needs Transformers 5.23 or later, and {__version__} is installed")
        model = base_of(model)
        if _OURS in vars(model):
            raise ConfigError("the continuous batching of this model is an engine's already; close that one first")
        super().__init__(drafter, backend, budget, options, frozen=frozen)
        self.model: Any = model
        self.tokenizer = tokenizer
        self.manager: SpeculativeManager | None = None  # that is running
        self._cached = vars(model).pop(_CACHED, None)
        setattr(model, _OURS, self._manager_of)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back as it was. Requests that still wait or run fail."""
        if self.manager is not None:
            self.manager.stop(hard_stop=True)
        for name in (_CACHED, _OURS):
            vars(self.model).pop(name, None)
        if self._cached is not None:
            setattr(self.model, _CACHED, self._cached)

    def _manager_of(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> SpeculativeManager:
        """As `PreTrainedModel.init_continuous_batching`. Hints at the work change nothing."""
        if isinstance(kept := getattr(self.model, _CACHED, None), SpeculativeManager):
            return kept
        config = generation_config or self.model.generation_config
        batching = continuous_batching_config or getattr(config, "continuous_batching_config", None)
        return SpeculativeManager(self, config, batching or ContinuousBatchingConfig())


speculate = Speculation


@dataclass
class SpeculativeOutput(GenerationOutput):
    """The tokens of a request so far, as Transformers gives them; when it has finished, also its `Generation`."""

    generation: Generation | None = None


class SpeculativeManager(api.ContinuousBatchingManager):
    """Transformers' manager of continuous batching, with an engine; see `emssd.integrations.continuous_batching`.

    From `start` to `stop`, the model may change within `pause` alone.

    Raises:
        ConfigError: the generation config asks for what cannot be honoured.
    """

    batch_processor: Any
    _generation_thread: Any

    def __init__(
        self, speculation: Speculation, generation_config: GenerationConfig, batching: ContinuousBatchingConfig
    ) -> None:
        check_config(generation_config, refused=_NOT_HERE)
        self.sampling = sampling_of(generation_config, batching.seed)
        self.speculation = speculation
        # What `super().__init__` sets, without what it refuses, such as models whose layers keep a state.
        self.model, self.continuous_batching_config = speculation.model, batching
        self.input_queue, self.cancel_queue = Queue(maxsize=batching.max_queue_size), Queue()
        self.background_thread_status, self.output_router = api.BackgroundThreadStatus(), api.OutputRouter()
        self._request_counter, self._request_lock, self._wake_up_loop = 0, Lock(), Event()
        self.batch_processor = self._generation_thread = self._original_attn_impl = None
        self.distributed_helper = DistributedHelper(None, None, {})
        self._use_prefix_sharing, self.is_tp_driver, self.warmed_up = False, True, True
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self.generation_config = copy(generation_config)
        if generation_config.eos_token_id is None:
            self.generation_config.eos_token_id = -1  # none, as for Transformers

    def warmup(self) -> None:
        """Nothing: the engine is made when the manager starts."""

    def start(self) -> None:
        """Start the thread. Raises what keeps the engine from being made."""
        if not self.is_running():
            self.batch_processor = None
        super().start()
        while self.is_running() and self.batch_processor is None:
            sleep(0.001)
        if self.background_thread_status.fatal_error is not None:
            raise self.background_thread_status.fatal_error

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        owner, memory = self.speculation, self.continuous_batching_config.max_memory_percent
        try:
            with owner.running(owner.model, owner.tokenizer, _BATCH_SIZE, memory):
                owner.manager = self
                super()._run_generation_loop(*args, **kwargs)
                owner.manager = None
        except Exception as error:  # from making the engine; the loop has handled its own
            self._handle_critical_error(error, None)
            self.background_thread_status.mark_as_stopped()

    def _create_batch_processor(self) -> Any:
        assert self.speculation.engine is not None
        return _Batch(self, self.speculation.engine)


class _Batch:
    """The requests of an engine, as the loop of a manager drives them: its batch processor."""

    use_async_batching, inputs_and_outputs = False, None

    def __init__(self, manager: SpeculativeManager, engine: Engine) -> None:
        self.manager, self.engine = manager, engine
        self.active: dict[str, tuple[RequestState, Row]] = {}

    def prepare_next_batch(self) -> bool:
        """Take in what was asked for since the last step. Returns whether there is something to decode."""
        status = self.manager.background_thread_status
        status.update_with_tp_status(status.local_status)  # first, so that what came before a stop is taken in
        if status.tp_status == status.HARD_STOP:
            return False
        if status.is_pause_requested():
            status.pause_and_wait()
            self.engine.target.renew()
            self.engine.runner.begin()
        for state in drain_queue(self.manager.input_queue):
            self._add(state)
        for request_id in drain_queue(self.manager.cancel_queue):
            self._drop([name for name in self.active if request_id in (name, name.split(_CHILD)[0])])
        return self.engine.has_work

    def _generation_step(self, model: Any) -> None:
        self.engine.step_in_memory()

    def update_batch(self) -> None:
        """Deliver the new tokens of all requests that stream or have finished."""
        outputs = list[GenerationOutput]()
        for name, (state, row) in list(self.active.items()):
            generation, start = None, len(state.generated_tokens)
            if new := row.output_ids[start:]:
                state.status = RequestStatus.DECODING
                state.generated_tokens += new
                state.logprobs += [token.logprob for token in row.logprobs[start:]]
                if state.record_timestamps:
                    state._timestamps += [perf_counter()] * len(new)
            if row.finish_reason is not None:
                del self.active[name]
                generation = Generation.of(row, self.engine.tokenizer)
                state.error = generation.error
                state.status = RequestStatus.FINISHED if generation.error is None else RequestStatus.FAILED
            if generation is not None or (state.streaming and new):
                outputs.append(_output(state, generation))
        if outputs:
            self.manager.output_router.deliver_batch(outputs)

    def has_pending_requests(self) -> bool:
        return self.engine.has_work

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        state.status, state.error = RequestStatus.FAILED, str(error)
        self.manager.output_router.deliver(_output(state))

    def fail_all_requests(self, error: Exception) -> None:
        """Deliver what has finished; the rest ends with `error`."""
        self.update_batch()
        for state, _ in self.active.values():
            self._handle_request_error(error, state)
        with suppress(PluginError):  # what ended the loop matters more than a drafter that cannot forget
            self.engine.clear()

    def _drop(self, names: list[str]) -> None:
        self.engine.clear(names)
        for name in names:
            del self.active[name]

    def _add(self, state: RequestState) -> None:
        """Queue the samples of a request. One that cannot be decoded fails alone."""
        last = getattr(state.logit_processor_kwargs.get("sampling"), "n", state.num_children + 1) - 1
        states = [*(state.fork(f"{state.request_id}{_CHILD}{sample}") for sample in range(last)), state]
        added: list[str] = []
        try:
            request = self._request(state, one_of_many=last > 0)
            for sample, one in enumerate(states):
                (row,) = self.engine.add(replace(request, request_id=one.request_id, sample=sample))
                self.active[one.request_id] = one, row
                added.append(one.request_id)
        except Exception as error:
            self._drop(added)
            for one in states:
                self._handle_request_error(error, one)

    def _request(self, state: RequestState, *, one_of_many: bool) -> Request:
        """The request of the first sample of `state`. Raises what keeps it from being one."""
        options, config, prompt = state.logit_processor_kwargs, self.manager.generation_config, state.initial_tokens
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise ConfigError(f"unknown option {unknown[0]!r} of a request; it takes {', '.join(_OPTIONS)}")
        identity = state.request_id.removeprefix("req_") if options.get("sampling") is None else "0"
        sampling: SamplingParams | None = options.get("sampling") or self.manager.sampling
        changes = {name: value for name, value in options.items() if name in ("temperature", "top_k", "top_p")}
        if self.manager.continuous_batching_config.return_logprobs and (sampling or _PLAIN).logprobs is None:
            changes |= {"logprobs": 0, "processed_logprobs": True}
        if changes or one_of_many:
            sampling = replace(sampling or _PLAIN, n=1, **changes)
        stop = options.get("stop") or config.stop_strings
        stop = [stop] if isinstance(stop, str) else stop
        limit = state.max_new_tokens
        if limit is None:
            limit = (config.max_length or self.engine.target.max_model_len) - len(prompt)
        stops = StopStrings(stop, self.engine.tokenizer) if stop else None
        eos = frozenset(state._eos_token_ids)
        return Request(state.request_id, tuple(prompt), limit, eos, stops, sampling, identity)


def _output(state: RequestState, generation: Generation | None = None) -> SpeculativeOutput:
    so_far: Any = state.to_generation_output()  # type: ignore[no-untyped-call]
    return SpeculativeOutput(**vars(so_far), generation=generation)
