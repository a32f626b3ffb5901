"""An adapter for Transformers' own extension point: ``model.generate(..., custom_generate=emssd.custom_generate)``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import ConfigError
from emssd.options import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["custom_generate"]

# Features of `generate` that change the tokens or the kind of result, with the values that leave plain greedy decoding.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "return_dict_in_generate": (False, None),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (False, None),
    "max_time": (None,),
    "stop_strings": (None,),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),
}
# What `generate` itself hands on; each is checked or without influence on the tokens.
_MODEL_KWARGS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: GenerationConfig | None = None,
    drafter: Any = DEFAULT_DRAFTER,
    backend: Any = "ragged",
    draft_tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding at any batch size through ``model.generate``, with the output of ``do_sample=False``.

    Transformers keeps ``streamer`` and ``assistant_model`` from custom functions: they have no effect here.

    Args:
        model: filled in by ``generate``, as are the next four.
        input_ids: ``[B, n]``, may be padded on the left, as its attention mask tells.
        logits_processor: must be empty.
        stopping_criteria: at EOS and at a maximum length only.
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
    _refuse_other_than_greedy(generation_config, logits_processor, model_kwargs)
    max_length, eos = _limits(generation_config, stopping_criteria)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    max_new_tokens = max_length - input_ids.shape[1]
    if max_new_tokens < 1:
        raise ConfigError(f"max_length leaves no room for new tokens beside inputs of {input_ids.shape[1]} tokens")
    with _training_flags_kept(model):
        engine = Engine.from_model(model, draft_tokenizer, drafter=drafter, backend=backend, batch_size=len(prompts))
        longest = max(map(len, prompts))
        if longest + max_new_tokens > engine.target.max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the "
                f"{engine.target.max_model_len} that this model takes; lower max_new_tokens or shorten the prompt"
            )
        requests = [Request(str(row), ids, max_new_tokens, frozenset(eos)) for row, ids in enumerate(prompts)]
        done = {int(generation.request_id): generation.token_ids for generation in engine.run(requests)}
    width = max(len(tokens) for tokens in done.values())
    pad = generation_config.pad_token_id
    fill = pad if pad is not None else next(iter(eos), 0)
    new = input_ids.new_full((len(requests), width), int(fill))
    for row, tokens in done.items():
        new[row, : len(tokens)] = torch.tensor(tokens, device=new.device)
    return torch.cat([input_ids, new], dim=1)


def _refuse_other_than_greedy(config: GenerationConfig, processors: Any, model_kwargs: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ConfigError(
                f"custom_generate=emssd.custom_generate decodes greedily; {name}={getattr(config, name)} is not "
                f"supported. Leave it out, or call generate without custom_generate"
            )
    if processors:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise ConfigError(f"emssd.custom_generate applies no logits processors; these were asked for: {names}")
    given = {name for name, value in model_kwargs.items() if value is not None} - _MODEL_KWARGS
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        given.add("past_key_values")
    if given:
        raise ConfigError(
            f"emssd.custom_generate decodes from input_ids and attention_mask with a KV cache of its own; leave out "
            f"{', '.join(sorted(given))}"
        )


def _limits(config: GenerationConfig, criteria: Iterable[Any] | None) -> tuple[int, list[int]]:
    """The maximum length, padding of the inputs included, and the EOS ids in the caller's order."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    lengths: list[int] = []
    eos: list[int] = []
    for item in criteria or ():
        # A caller's own criterion of these types replaces the one that `generate` made of the config.
        if type(item) is MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is EosTokenCriteria:
            eos.extend(item.eos_token_id.flatten().tolist())
        else:
            raise ConfigError(
                f"emssd.custom_generate stops at EOS and max length only; asked for: {type(item).__name__}"
            )
    return min(lengths, default=int(config.max_length)), eos


def _prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
) -> list[tuple[int, ...]]:
    """The rows without their padding.

    Raises:
        ConfigError: padding elsewhere than on the left, an empty row, or positions of the caller's own.
    """
    mask = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
    if not (mask[:, -1] == 1).all() or (mask.diff(dim=1) < 0).any():
        raise ConfigError(
            "emssd.custom_generate wants every row padded on the left, or not at all, as decoder-only models do; "
            "set tokenizer.padding_side='left'"
        )
    if positions is not None and ((positions != mask.cumsum(dim=1) - 1) & (mask == 1)).any():
        raise ConfigError("emssd.custom_generate counts positions from 0 in every row; leave out position_ids")
    return [tuple(ids[keep == 1].tolist()) for ids, keep in zip(input_ids, mask, strict=True)]


@contextmanager
def _training_flags_kept(model: PreTrainedModel) -> Iterator[None]:
    """An engine switches its model to evaluation for good; whoever calls `generate` in training wants it back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
