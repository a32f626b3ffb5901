"""`Rollouts`: the trainers of TRL sample their completions with emssd, from the model that they train."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from emssd.decoding.engine import RunReport
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.errors import ConfigError
from emssd.integrations.custom_generate import Call
from emssd.integrations.installed import check_installed
from emssd.integrations.kept_engine import KeptEngine
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["Rollouts"]

_GPU_SHARE = 0.5  # of a GPU's free memory for the KV cache: the trainer takes the rest
_OTHER_ENGINES = ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged")


class Rollouts:
    """Decodes the completions that a trainer learns from: the same ones whatever drafts.

    ``GRPOTrainer(…, rollout_func=Rollouts())`` is all there is to do. A trainer that has no such argument calls its
    model's ``generate``: see `generating`.

    The engine runs the trainer's own model, in evaluation mode and without a copy of weights, so that there is nothing
    to synchronise. It lives as long as this object, so a drafter that remembers texts drafts from those of earlier
    rollouts. Seeds come from PyTorch's global generator, which the trainer seeds.

    Args:
        drafter, backend, budget: as in `Engine.from_model`.
        options: as in `Engine.from_model`. By default, ``batch_size`` is all rows of the first rollout, and
            ``kv_memory`` half of the memory that is free on a GPU. With ``compile``, each rollout copies the weights
            anew into the program.

    Attributes:
        report: of the last rollout; ``None`` before the first.
    """

    def __init__(
        self, drafter: Any = DEFAULT_DRAFTER, backend: Any = "ragged", budget: Any = "adaptive", **options: Any
    ) -> None:
        check_installed("trl")
        self.report: RunReport | None = None
        self._engine = KeptEngine(drafter, backend, budget, options)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """One completion of each prompt, as `GRPOTrainer` wants them of its ``rollout_func``.

        Args:
            prompts: texts, or lists of messages; equal ones are samples of one prompt, which is computed once.
            trainer: whose model, tokenizer and sampling options count.

        Returns:
            By prompt ``prompt_ids``, ``completion_ids`` (an EOS included), and ``logprobs``, those of the completion's
            tokens in the distribution that they were drawn from.
        """
        model = _model_of(trainer)
        if trainer.tools:
            raise ConfigError("TRL answers the results of tools with a generate of its own; leave out rollout_func")
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("emssd decodes text, and these prompts have images; leave out rollout_func")
        width = max(map(len, prompt_ids))
        pad = trainer.generation_config.pad_token_id or 0
        rows = [[pad] * (width - len(ids)) + list(ids) for ids in prompt_ids]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
        generations: list[Generation] = []
        with torch.no_grad():
            model.generate(
                input_ids=torch.tensor(rows, device=trainer.accelerator.device),
                attention_mask=torch.tensor(mask, device=trainer.accelerator.device),
                generation_config=trainer.generation_config,
                custom_generate=partial(self._decode, generations, trainer.processing_class),
            )
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [list(row.token_ids) for row in generations],
            "logprobs": [[token.logprob for token in row.logprobs or ()] for row in generations],
        }

    @contextmanager
    def generating(self, trainer: Any) -> Iterator[None]:
        """Within, the model of `trainer` generates with emssd: for trainers that call it, as `OnlineDPOTrainer`."""
        model = _model_of(trainer)
        model.generate = partial(model.generate, custom_generate=partial(self._decode, None, trainer.processing_class))
        try:
            yield
        finally:
            del model.generate

    def _decode(
        self,
        generations: list[Generation] | None,
        tokenizer: Any,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Decode ``input_ids [B, n]`` to ``[B, n + new]``, as `generate` does; `generations` gets the generations."""
        call = Call.of(input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs)
        if call.criteria or call.num_samples > 1:
            raise ConfigError("a rollout ends at EOS and lengths, and has one text a row; leave other options out")
        if generations is not None:
            sampling = replace(call.sampling or SamplingParams(temperature=0.0), logprobs=0, processed_logprobs=True)
            call = replace(call, sampling=sampling)
        samples: dict[tuple[int, ...], count[int]] = defaultdict(count)  # of equal prompts
        requests = [
            call.request(row, sample_of=str(call.prompts.index(ids)), sample=next(samples[ids]))
            for row, ids in enumerate(call.prompts)
        ]
        done = self._run(model, tokenizer, requests)
        if generations is not None:
            generations += done
        return call.with_new([row.token_ids for row in done])

    def _run(self, model: PreTrainedModel, tokenizer: Any, requests: Seq[Request]) -> list[Generation]:
        """The generations of `requests`, in their order."""
        with self._engine.running(model, tokenizer, len(requests), _GPU_SHARE) as engine:
            longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
            if longest > engine.target.max_model_len:
                raise ConfigError(
                    f"the longest prompt and its completion are up to {longest} tokens, and this model takes "
                    f"{engine.target.max_model_len}; lower max_completion_length, or leave out long prompts"
                )
            done = {(row.request_id, row.sample): row for row in engine.run(requests)}
        self.report = engine.report
        return [done[request.prompt_id, request.sample] for request in requests]


def _model_of(trainer: Any) -> Any:
    """The model that `trainer` trains, as it generates with it."""
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError("emssd needs the whole model in each process; train without FSDP and DeepSpeed")
    for name in _OTHER_ENGINES:
        if getattr(trainer, name, False):
            raise ConfigError(f"emssd decodes in the place of other engines; leave out {name}")
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(f"emssd does not see the learned prompts of {adapter.peft_type.value}; use LoRA, say")
    return model
