"""An adapter for Transformers' own extension point: ``model.generate(..., custom_generate=emssd.custom_generate)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.errors import ConfigError
from emssd.integrations.hf_criteria import Criteria, limits, of_strings

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from emssd.decoding.engine import Engine
    from emssd.sequences import Request

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
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),
}
# What `generate` itself hands on; each is checked or without influence on the tokens.
_MODEL_KWARGS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
_MODEL_KWARGS |= {"output_attentions", "output_hidden_states"}  # those are parts of a dict, which is refused


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: GenerationConfig | None = None,
    drafter: Any = DEFAULT_DRAFTER,
    backend: Any = "ragged",
    budget: Any = "adaptive",
    draft_tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding at any batch size through ``model.generate``, with the output of ``do_sample=False``.

    Transformers keeps ``streamer`` and ``assistant_model`` from custom functions: they have no effect here.

    Args:
        model: filled in by ``generate``, as are the next four.
        input_ids: ``[B, n]``, may be padded on the left, as its attention mask tells.
        logits_processor: none that has an effect.
        stopping_criteria: at EOS, at a maximum length, at stop strings, and at a time: then each row ends with the next
            token that it gets.
        generation_config: must ask for greedy decoding.
        drafter: as in `Engine.from_model`; pass it to ``generate`` beside ``custom_generate``.
        backend, budget: as `drafter`.
        draft_tokenizer: the target's tokenizer, for drafters that compare vocabularies, and for `stop_strings`.
        stop_strings: texts that end a row. They need `draft_tokenizer`, as Transformers keeps its own ``tokenizer``
            from custom functions; and it refuses those of a generation config.
        model_kwargs: of these, ``attention_mask [B, n]`` tells which tokens are padding.

    Returns:
        ``[B, n + new]`` int64: inputs and new tokens, padded on the right with ``pad_token_id``. Without any EOS token
        rows go on until all have come to an end, as those of Transformers.

    Raises:
        ConfigError: an option that would make the output other than greedy decoding's.
    """
    from emssd.decoding.engine import Engine
    from emssd.sequences import Request

    assert generation_config is not None
    _refuse_other_than_greedy(generation_config, logits_processor, model_kwargs, input_ids.shape[1])
    max_length, eos, others = limits(generation_config, stopping_criteria)
    others += of_strings(stop_strings, draft_tokenizer)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    max_new_tokens = max_length - input_ids.shape[1]
    if max_new_tokens < 1:
        raise ConfigError(f"max_length leaves no room for new tokens beside inputs of {input_ids.shape[1]} tokens")
    with _training_flags_kept(model):
        engine = Engine.from_model(
            model, draft_tokenizer, drafter=drafter, backend=backend, budget=budget, batch_size=len(prompts)
        )
        longest = max(map(len, prompts))
        if longest + max_new_tokens > engine.target.max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the "
                f"{engine.target.max_model_len} that this model takes; lower max_new_tokens or shorten the prompt"
            )
        padding = [row[: input_ids.shape[1] - len(ids)].tolist() for row, ids in zip(input_ids, prompts, strict=True)]
        stops = [Criteria(others, left) if others else None for left in padding]
        requests = [
            Request(str(row), ids, max_new_tokens, frozenset(eos), stop)
            for row, (ids, stop) in enumerate(zip(prompts, stops, strict=True))
        ]
        done = {int(generation.request_id): generation.token_ids for generation in engine.run(requests)}
        if not eos:
            done = _all_of_one_length(engine, requests, done, stops)
    width = max(len(tokens) for tokens in done.values())
    pad = generation_config.pad_token_id
    fill = pad if pad is not None else next(iter(eos), 0)
    new = input_ids.new_full((len(requests), width), int(fill))
    for row, tokens in done.items():
        new[row, : len(tokens)] = torch.tensor(tokens, device=new.device)
    return torch.cat([input_ids, new], dim=1)


def _all_of_one_length(
    engine: Engine, requests: list[Request], done: dict[int, tuple[int, ...]], stops: list[Criteria | None]
) -> dict[int, tuple[int, ...]]:
    """The new tokens of all rows where no EOS marks an end: up to the last one that a row needs, or to when time ended.

    Transformers pads a row that has ended only if there is an EOS; else it goes on for as long as the others do.
    """
    cut_short = [row for row, stop in enumerate(stops) if stop is not None and stop.time_is_over]
    width = min(len(done[row]) for row in cut_short) if cut_short else max(map(len, done.values()))
    more = [
        replace(request, prompt_ids=request.prompt_ids + done[row], max_new_tokens=width - len(done[row]), stop=None)
        for row, request in enumerate(requests)
        if len(done[row]) < width
    ]
    rest = {int(generation.request_id): generation.token_ids for generation in engine.run(more)}
    return {row: (tokens + rest.get(row, ()))[:width] for row, tokens in done.items()}


def _refuse_other_than_greedy(
    config: GenerationConfig, processors: Any, model_kwargs: dict[str, Any], num_inputs: int
) -> None:
    from transformers.generation.logits_process import MinLengthLogitsProcessor

    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ConfigError(
                f"custom_generate=emssd.custom_generate decodes greedily; {name}={getattr(config, name)} is not "
                f"supported. Leave it out, or call generate without custom_generate"
            )
    effective = [
        type(each).__name__
        for each in processors or ()
        if type(each) is not MinLengthLogitsProcessor or each.min_length > num_inputs
    ]
    if effective:
        raise ConfigError(
            f"emssd.custom_generate applies no logits processors; these were asked for: {', '.join(effective)}"
        )
    given = {name for name, value in model_kwargs.items() if value is not None} - _MODEL_KWARGS
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        given.add("past_key_values")
    if given:
        raise ConfigError(
            f"emssd.custom_generate decodes from input_ids and attention_mask with a KV cache of its own; leave out "
            f"{', '.join(sorted(given))}"
        )


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
