"""An adapter for Transformers' own extension point: ``model.generate(..., custom_generate=emssd.custom_generate)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["custom_generate"]

# Features of `generate` that change which token is chosen, with the value that leaves the choice to plain greedy.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "penalty_alpha": (None, 0.0),
    "constraints": (None,),
    "return_dict_in_generate": (False, None),
    "prompt_lookup_num_tokens": (None,),
    "max_time": (None,),
    "stop_strings": (None,),
}


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: GenerationConfig | None = None,
    drafter: Any = "llma",
    backend: Any = "ragged",
    draft_tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding at any batch size through ``model.generate``, with the output of ``do_sample=False``.

    Args:
        model: filled in by ``generate``, as are the next four.
        input_ids: ``[B, n]``, may be padded on the left, as its attention mask tells.
        logits_processor: must be empty.
        stopping_criteria: must be the default ones.
        generation_config: must ask for greedy decoding.
        drafter: as in `emssd.assembly.from_model`; pass it to ``generate`` beside ``custom_generate``.
        backend: as `drafter`.
        draft_tokenizer: the target's tokenizer, for drafters that compare vocabularies.
        model_kwargs: of these, ``attention_mask [B, n]`` tells which tokens are padding.

    Returns:
        ``[B, n + new]`` int64: inputs and new tokens, padded on the right with ``pad_token_id``.

    Raises:
        ConfigError: an option that would make the output other than greedy decoding's.
    """
    from emssd.engine import Engine
    from emssd.sequence import Request

    assert generation_config is not None
    _refuse_other_than_greedy(generation_config, logits_processor, stopping_criteria)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    eos = _as_set(generation_config.eos_token_id)
    max_new_tokens = int(generation_config.max_length) - input_ids.shape[1]
    if max_new_tokens < 1:
        raise ConfigError(f"max_length leaves no room for new tokens beside inputs of {input_ids.shape[1]} tokens")
    engine = Engine.from_model(model, draft_tokenizer, drafter=drafter, backend=backend, batch_size=input_ids.shape[0])
    requests = [
        Request(str(row), tuple(ids[keep.bool()].tolist()), max_new_tokens, eos)
        for row, (ids, keep) in enumerate(zip(input_ids, mask, strict=True))
    ]
    done = {int(generation.request_id): generation.token_ids for generation in engine.run(requests)}
    width = max(len(tokens) for tokens in done.values())
    pad = generation_config.pad_token_id
    fill = pad if pad is not None else min(eos, default=0)
    new = input_ids.new_full((len(requests), width), int(fill))
    for row, tokens in done.items():
        new[row, : len(tokens)] = torch.tensor(tokens, device=new.device)
    return torch.cat([input_ids, new], dim=1)


def _refuse_other_than_greedy(config: GenerationConfig, processors: Any, criteria: Any) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ConfigError(
                f"custom_generate=emssd.custom_generate decodes greedily; {name}={getattr(config, name)} is not "
                f"supported. Leave it out, or call generate without custom_generate"
            )
    if processors:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise ConfigError(f"emssd.custom_generate applies no logits processors; these were asked for: {names}")
    known = {"MaxLengthCriteria", "EosTokenCriteria"}
    if foreign := [type(item).__name__ for item in criteria or () if type(item).__name__ not in known]:
        raise ConfigError(f"emssd.custom_generate stops at EOS and max length only; asked for: {', '.join(foreign)}")


def _as_set(eos: Any) -> frozenset[int]:
    if eos is None:
        return frozenset()
    return frozenset(int(token) for token in (eos if isinstance(eos, (list, tuple)) else [eos]))
