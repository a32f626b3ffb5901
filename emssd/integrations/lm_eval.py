"""The model ``emssd`` of EleutherAI's evaluation harness: an engine answers ``generate_until``, `HFLM` all else.

``import emssd.integrations.lm_eval`` registers it; the command ``emssd-lm-eval`` is ``lm_eval`` with it registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import MultiTokenEOSCriteria
from tqdm import tqdm

from emssd.decoding.engine import Engine
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.integrations.custom_generate import Call
from emssd.sequences import StopStrings

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["EmssdLM"]

_KINDS = ("drafter", "backend", "budget")
_OPTIONS = {field.name for field in dataclasses.fields(EngineOptions)} - {"batch_size"}


@register_model("emssd")
class EmssdLM(HFLM):  # type: ignore[misc]  # it is untyped
    """`HFLM` whose ``generate_until`` decodes speculatively, with the texts and scores of ``--model hf``.

    A task's requests are one continuous batch of `batch_size` rows. All that Transformers' ``generate`` does with a
    task's ``generation_kwargs`` is done, or refused with a sentence; see `emssd.custom_generate`.

    Args:
        pretrained: as of `HFLM`.
        drafter, backend, budget: as in `Engine.from_model`. With a name go options of the plugin, as in
            ``drafter=draft_model,drafter.path=SMALL``.
        batch_size: rows decoded together; ``auto`` takes `max_batch_size`. Other requests are batched by `HFLM`.
        max_batch_size: as of `HFLM`.
        options: fields of `emssd.decoding.options.EngineOptions`, options of plugins, and arguments of `HFLM`.
    """

    batch_size_per_gpu: int | str  # of `HFLM`

    def __init__(
        self,
        pretrained: Any,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        **options: Any,
    ) -> None:
        registry, chosen = Registry(), {"drafter": drafter, "backend": backend, "budget": budget}
        self._choices = {kind: _choice(registry, kind, chosen[kind], _taken(options, kind)) for kind in _KINDS}
        self._options = {name: options.pop(name) for name in list(options) if name in _OPTIONS}
        self._num_rows = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        if options.get("mixed_precision_dtype") is not None:
            raise ConfigError("mixed_precision_dtype would change what the engine decodes; leave it out, and set dtype")
        try:
            super().__init__(pretrained, batch_size=batch_size, max_batch_size=max_batch_size, **options)
        except OSError as error:  # of Transformers, which explains at length
            why = str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"cannot load {pretrained!r}: {why}. Give a folder, or an id of the hub") from error
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ConfigError(f"neither emssd nor HFLM has such an argument: {error}") from error
        if self.backend != "causal":
            raise ConfigError(f"emssd decodes causal language models, and this one is {self.backend}; use --model hf")

    @cached_property
    def engine(self) -> Engine:
        """The engine around the model that `HFLM` has loaded."""
        return Engine.from_model(
            self.model, self.tokenizer, batch_size=self._num_rows, **self._choices, **self._options
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts of `requests`, up to their stop strings. Raises ConfigError: a length that counts padding."""
        for name in ("max_length", "min_length"):
            if any(request.args[1].get(name) for request in requests):
                raise ConfigError(f"{name} counts padding, so texts depend on the batch; ask for max_gen_toks instead")
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests")
        # `HFLM` hands over all requests with the same options in one batch, and the engine makes its own of them.
        before, self.batch_size_per_gpu = self.batch_size_per_gpu, max(len(requests), 1)
        try:
            with bar:
                self._row_done = bar.update
                texts: list[str] = super().generate_until(requests, disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = before
        return texts

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """``[B, n + new]`` for ``context [B, n]``: Transformers prepares the call, and the engine decodes."""
        strings = [string for string in stop if string]

        def decode(
            model: PreTrainedModel,
            input_ids: torch.Tensor,
            logits_processor: Any = None,
            stopping_criteria: Any = None,
            generation_config: GenerationConfig | None = None,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            criteria = [
                criterion for criterion in stopping_criteria or () if type(criterion) is not MultiTokenEOSCriteria
            ]
            call = Call.of(input_ids, generation_config, logits_processor, criteria, model_kwargs)
            if call.criteria or call.num_samples > 1:
                raise ConfigError("emssd answers each request once, up to the strings of `until`; use --model hf")
            stops = StopStrings(strings, self.tokenizer) if strings else None
            new: dict[str, tuple[int, ...]] = {}
            for generation in self.engine.run([call.request(row, stops) for row in range(len(call.prompts))]):
                new[generation.request_id] = generation.token_ids
                self._row_done()
            return call.with_new([new[str(row)] for row in range(len(new))])

        ids: torch.Tensor = super()._model_generate(
            context, max_length, stop, custom_generate=decode, **generation_kwargs
        )
        return ids


def _taken(options: dict[str, Any], kind: str) -> dict[str, Any]:
    """Take ``KIND.OPTION`` out of `options`. Returns them by their own names."""
    names = [name for name in options if name.startswith(f"{kind}.")]
    return {name.removeprefix(f"{kind}."): options.pop(name) for name in names}


def _choice(registry: Registry, kind: str, chosen: Any, values: Mapping[str, Any]) -> Any:
    """The plugin that is `chosen`, with `values` of its options."""
    if not isinstance(chosen, str):
        if values:
            raise ConfigError(f"{kind}.{next(iter(values))} goes with a name as in {kind}=NAME; {kind} is {chosen!r}")
        return chosen
    registry.find(kind, chosen)
    return registry.configured(kind, chosen, values) if values else chosen
