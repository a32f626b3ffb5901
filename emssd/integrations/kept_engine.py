"""`KeptEngine`: one engine for a model that others train, and between whose runs the model may change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from emssd.decoding.assembly import OF_A_LOADED_MODEL, find_plugins, options_of
from emssd.decoding.engine import Engine, RunReport
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.hooks.registry import Registry
from emssd.model.hf.streams import lock_of, replaced_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["KeptEngine", "base_of", "evaluating"]


class KeptEngine:
    """An engine that is made for the first run of a model, and kept, so that its drafter may remember texts.

    Args:
        drafter, backend, budget, frozen, options: as in `Engine.from_model`. An engine that is not ``frozen`` takes the
            model anew at the beginning of each run.

    Attributes:
        engine: of the last run; ``None`` before the first.

    Raises:
        ConfigError, PluginError: an option, or a plugin, that cannot be.
    """

    def __init__(
        self, drafter: Any, backend: Any, budget: Any, options: dict[str, Any], *, frozen: bool = False
    ) -> None:
        options_of(options, OF_A_LOADED_MODEL)
        find_plugins(Registry(), drafter, backend, budget)
        self.engine: Engine | None = None
        self._options = {"drafter": drafter, "backend": backend, "budget": budget, "frozen": True} | options
        self._frozen, self._lock = frozen, Lock()

    @contextmanager
    def running(
        self, model: PreTrainedModel, tokenizer: Any, batch_size: int, memory: float | None
    ) -> Iterator[Engine]:
        """Within, the engine decodes `model` as it is now, in evaluation mode; one run at a time.

        Args:
            batch_size: of an engine that is made, if the options have none.
            memory: the share of a GPU's free memory for its KV cache, likewise.
        """
        if not self._lock.acquire(blocking=False):
            raise ConfigError("this model's engine is decoding for another manager; stop that one first")
        with ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.enter_context(evaluating(model, compiles=bool(self._options.get("compile"))))
            if self.engine is None or not self._serves(self.engine, model):
                options = {"batch_size": batch_size} | self._options
                if model.device.type != "cpu" and memory is not None:
                    options = {"kv_memory": str(memory)} | options
                self.engine = Engine.from_model(model, tokenizer, **options)
            self.engine.report = RunReport()
            yield self.engine

    def _serves(self, engine: Engine, model: PreTrainedModel) -> bool:
        """Whether the engine takes the model as it is now."""
        try:
            if not self._frozen:
                engine.refresh()
        except UnsupportedModelError:  # in another dtype, say
            return False
        return engine.target.model is model


def base_of(model: Any) -> Any:
    """The model within an adapter of PEFT, or `model`. Raises ConfigError: the adapter has learned prompts."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(f"emssd does not see the learned prompts of {adapter.peft_type.value}; use LoRA, say")
    return model if adapter is None else model.get_base_model()


@contextmanager
def evaluating(model: PreTrainedModel, *, compiles: bool = False) -> Iterator[None]:
    """Put `model` into evaluation mode without autocast, so that it computes in the precision of its KV cache.

    At the end, each module has its mode back.

    For mixed precision, Accelerate gives a model a forward of its own and keeps the one before as `_original_forward`.
    Some trainers of TRL give it one that leaves out logits which they do not need. A program is compiled of the class's
    own, and of no other.
    """
    attributes: dict[str, Any] = vars(model)
    before = attributes.get("_original_forward")
    left: Any = getattr(attributes.get("forward") if before is None else before, "__func__", None)
    if getattr(left, "__globals__", {}).get("__name__") == "trl.trainer.utils":  # which names it so
        left = getattr(inspect.getclosurevars(left).nonlocals.get("original_forward"), "__func__", None)
    is_own = left is not None and left in (type(model).forward, inspect.unwrap(type(model).forward))
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()  # type: ignore[no-untyped-call]  # it has no annotations
        stack.enter_context(torch.autocast(model.device.type, enabled=False))
        if compiles and is_own:
            stack.enter_context(lock_of(model))
            patched = {name: attributes.pop(name) for name in {"forward", "_original_forward"} & attributes.keys()}
            stack.callback(lambda: attributes.update(patched))
        elif before is not None:
            stack.enter_context(lock_of(model))
            stack.enter_context(replaced_forward(model, before))
        yield
