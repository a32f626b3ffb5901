"""`Rollouts`: the trainers of TRL sample their completions with emssd, from the model that they train."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count
from typing import Any

from emssd.decoding.engine import RunReport
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.errors import ConfigError
from emssd.integrations.generate_options import check_config, sampling_of, token_ids
from emssd.integrations.installed import check_installed
from emssd.integrations.kept_engine import KeptEngine, base_of
from emssd.sampling import SamplingParams
from emssd.sequences import Request

__all__ = ["Rollouts"]

_GPU_SHARE = 0.5  # of a GPU's free memory for the KV cache: the trainer takes the rest
_NOT_HERE = frozenset({"min_length", "min_new_tokens", "max_time", "stop_strings", "num_return_sequences"})
_OTHER_ENGINES = ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged")


class Rollouts:
    """Decodes the completions that a trainer learns from: the same ones whatever drafts.

    ``GRPOTrainer(…, rollout_func=Rollouts())`` is all there is to do. Beside `emssd.speculate`, this hands over
    log-probabilities, and leaves the model in the precision of its weights.

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
        model, config = _model_of(trainer), trainer.generation_config
        if trainer.tools:
            raise ConfigError("TRL answers the results of tools with a generate of its own; leave out rollout_func")
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("emssd decodes text, and these prompts have images; leave out rollout_func")
        check_config(config, refused=_NOT_HERE)
        sampling = sampling_of(config, None) or SamplingParams(temperature=0.0)
        sampling = replace(sampling, logprobs=0, processed_logprobs=True)
        rows, limit, eos = [*map(tuple, prompt_ids)], config.max_new_tokens, frozenset(token_ids(config.eos_token_id))
        samples: dict[tuple[int, ...], count[int]] = defaultdict(count)  # of equal prompts
        requests = [
            Request(str(row), ids, limit, eos, None, sampling, str(rows.index(ids)), next(samples[ids]))
            for row, ids in enumerate(rows)
        ]
        with self._engine.running(model, trainer.processing_class, len(rows), _GPU_SHARE) as engine:
            longest = max(map(len, rows)) + limit
            if longest > engine.target.max_model_len:
                raise ConfigError(
                    f"the longest prompt and its completion are up to {longest} tokens, and this model takes "
                    f"{engine.target.max_model_len}; lower max_completion_length, or leave out long prompts"
                )
            done = {(row.request_id, row.sample): row for row in engine.run(requests)}
        self.report = engine.report
        generations = [done[request.prompt_id, request.sample] for request in requests]
        return {
            "prompt_ids": [list(ids) for ids in rows],
            "completion_ids": [list(row.token_ids) for row in generations],
            "logprobs": [[token.logprob for token in row.logprobs or ()] for row in generations],
        }


def _model_of(trainer: Any) -> Any:
    """The model that `trainer` trains, as it generates with it."""
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError("emssd needs the whole model in each process; train without FSDP and DeepSpeed")
    for name in _OTHER_ENGINES:
        if getattr(trainer, name, False):
            raise ConfigError(f"emssd decodes in the place of other engines; leave out {name}")
    return base_of(trainer.accelerator.unwrap_model(trainer.model_wrapped))
