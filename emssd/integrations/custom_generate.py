"""An adapter for Transformers' own extension point: ``model.generate(..., custom_generate=emssd.custom_generate)``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from emssd.decoding.engine import Engine
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.errors import ConfigError
from emssd.integrations.generate_options import (
    Criteria,
    check_config,
    check_ngrams,
    check_processors,
    limits,
    of_strings,
    sampling_of,
)
from emssd.integrations.kept_engine import evaluating
from emssd.model.hf.refusals import length_limit
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request, Stop

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["Call", "custom_generate"]

# Keywords that `generate` itself passes on; each is checked or without influence on the tokens.
_CACHES = {"cache", "past_key_values", "cache_params"}  # by the version of Transformers, and of Mamba and its like
_MODEL_KWARGS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *_CACHES}
_MODEL_KWARGS |= {"output_attentions", "output_hidden_states"}  # those are parts of a dict, which is refused


def _streamed(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The custom function `decode`, whose new tokens, once all are there, go to the streamer; it ends on errors too."""

    @wraps(decode)
    def run(model: Any, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        streamer = _streamer()
        try:
            tokens = decode(model, input_ids, *arguments, **options)
            for column in tokens[:, input_ids.shape[1] :].cpu().T if streamer is not None else ():
                streamer.put(column)
            return tokens
        finally:
            if streamer is not None:
                streamer.end()

    return run


def _streamer() -> Any:
    """The streamer of the innermost `generate` of Transformers: nothing else of the call leads to it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals["__name__"] == "transformers.generation.utils":
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


@_streamed
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
    seed: int | None = None,
    grammar: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding at any batch size through ``model.generate``, with the output of the model alone.

    With ``do_sample=False``, this is what ``generate`` gives without emssd. With ``do_sample=True``, it follows the
    same distribution, and is a function of the seed: the same whatever drafts.

    A ``streamer`` gets all new tokens at the end. Transformers keeps ``assistant_model`` from custom functions: it has
    no effect here.

    Args:
        model: filled in by ``generate``, as are the next four.
        input_ids: ``[B, n]``, may be padded on the left, as its attention mask tells.
        logits_processor: made by ``generate`` of the fields below; any other with an effect is refused.
        stopping_criteria: at EOS, at a maximum length, at stop strings, and at a time: then each row ends with the next
            token that it gets.
        generation_config: ``do_sample``, ``temperature``, ``top_k`` (Transformers' default is 50), ``top_p``,
            ``min_p``, ``typical_p``, ``repetition_penalty``, ``no_repeat_ngram_size``, ``num_return_sequences``,
            ``suppress_tokens``, and ``sequence_bias`` and ``bad_words_ids`` of single tokens are followed, as are
            lengths and ends. All others must leave the tokens alone. Padding is no part of a row; where Transformers
            would count it for ``no_repeat_ngram_size``, and that could be seen, the call is refused.
        drafter: as in `Engine.from_model`; pass it to ``generate`` beside ``custom_generate``.
        backend, budget: as `drafter`.
        draft_tokenizer: the target's tokenizer, for drafters that compare vocabularies, and for `stop_strings` and
            `grammar`.
        stop_strings: texts that end a row. They need `draft_tokenizer`, as Transformers keeps its own ``tokenizer``
            from custom functions; and it refuses those of a generation config.
        seed: of what is drawn; by default PyTorch's global generator gives one, which ``torch.manual_seed`` sets.
        grammar: the form of the new text, as in `SamplingParams`; it needs `draft_tokenizer`.
        model_kwargs: of these, ``attention_mask [B, n]`` tells which tokens are padding.

    Returns:
        ``[B, n + new]`` int64: inputs and new tokens, padded on the right with ``pad_token_id``. `B` counts each prompt
        ``num_return_sequences`` times. Without any EOS token rows go on until all have come to an end, as those of
        Transformers.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    if draft_tokenizer is not None and not hasattr(draft_tokenizer, "get_vocab"):
        raise ConfigError(f"draft_tokenizer is {draft_tokenizer!r}; give the tokenizer itself, as of AutoTokenizer")
    assert generation_config is not None
    call = Call.of(input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs, seed)
    if grammar is not None:
        sampling = replace(call.sampling or SamplingParams(temperature=0.0), grammar=grammar)
        call = replace(call, sampling=sampling)
    others = [*call.criteria, *of_strings(stop_strings, draft_tokenizer)]
    prompts, num_samples = call.prompts, call.num_samples
    longest = max(map(len, prompts))
    with evaluating(model):
        engine = Engine.from_model(
            model,
            draft_tokenizer,
            drafter=drafter,
            backend=backend,
            budget=budget,
            batch_size=len(prompts),
            max_model_len=length_limit(model.config) or longest + call.max_new_tokens,
            frozen=True,  # as long as this call
        )
        if longest + call.max_new_tokens > engine.target.max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens and {call.max_new_tokens} new ones are more than the "
                f"{engine.target.max_model_len} that this model takes; lower max_new_tokens or shorten the prompt"
            )
        stops = [Criteria(others, left) if others else None for left in call.padding]
        requests = [
            call.request(row, stop, sample_of=str(row // num_samples), sample=row % num_samples)
            for row, stop in enumerate(stops)
        ]
        done = _by_row(engine.run(requests), num_samples)
        if not call.eos_token_ids:
            done = _all_of_one_length(engine, requests, done, num_samples)
    check_ngrams(generation_config, call.padding, [ids + done[row][:-1] for row, ids in enumerate(prompts)])
    return call.with_new([done[row] for row in range(len(prompts))])


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a custom function by `generate`, checked, in the terms of an engine.

    Attributes:
        input_ids: ``[B, n]``.
        prompts: ``[B]`` its rows without their padding.
        padding: ``[B]`` what stands to the left of each.
        num_samples: rows of each prompt, one after another.
        criteria: of Transformers; what else ends a row.
        pad: fills rows that are shorter than others.
    """

    input_ids: torch.Tensor
    prompts: list[tuple[int, ...]]
    padding: list[list[int]]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams | None
    num_samples: int
    criteria: list[Any]
    pad: int

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        config: GenerationConfig | None,
        processors: Iterable[Any] | None,
        criteria: Iterable[Any] | None,
        model_kwargs: dict[str, Any],
        seed: int | None = None,
    ) -> Call:
        """Read what `generate` hands on. Raises ConfigError: something of it that cannot be honoured."""
        assert config is not None
        check_config(config, refused={"return_dict_in_generate"})
        _check_inputs(model_kwargs)
        width = input_ids.shape[1]
        max_length, eos, others = limits(config, criteria)
        prompts = _prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        padding = [row[: width - len(ids)].tolist() for row, ids in zip(input_ids, prompts, strict=True)]
        check_processors(config, processors, [len(left) for left in padding], width)
        check_ngrams(config, padding, prompts)
        sampling, num_samples, pad = sampling_of(config, seed), config.num_return_sequences or 1, config.pad_token_id
        if max_length <= width:
            raise ConfigError(f"max_length leaves no room for new tokens beside inputs of {width} tokens")
        fill = int(pad if pad is not None else next(iter(eos), 0))
        return cls(input_ids, prompts, padding, max_length - width, frozenset(eos), sampling, num_samples, others, fill)

    def request(self, row: int, stop: Stop | None = None, **sample: Any) -> Request:
        """The request of a row."""
        ids, limit = self.prompts[row], self.max_new_tokens
        return Request(str(row), ids, limit, self.eos_token_ids, stop, self.sampling, **sample)

    def with_new(self, rows: Seq[Seq[int]]) -> torch.Tensor:
        """``[B, n + longest]``: the inputs and the new tokens of each row, padded on the right."""
        new = pad_sequence([torch.tensor(tokens, dtype=torch.int64) for tokens in rows], True, self.pad)
        return torch.cat([self.input_ids, new.to(self.input_ids.device)], dim=1)


_New = dict[int, tuple[int, ...]]
"""The new tokens of each row."""


def _all_of_one_length(engine: Engine, requests: list[Request], done: _New, num_samples: int) -> _New:
    """The new tokens of all rows where no EOS marks an end: up to the last one that a row needs, or to when time ended.

    Transformers pads a row that has ended only if there is an EOS; else it goes on for as long as the others do.
    """
    stops = {row: request.stop for row, request in enumerate(requests)}
    cut_short = [done[row] for row, stop in stops.items() if isinstance(stop, Criteria) and stop.time_is_over]
    width = min(map(len, cut_short)) if cut_short else max(map(len, done.values()))
    more = [
        replace(request, prompt_ids=request.prompt_ids + done[row], max_new_tokens=width - len(done[row]), stop=None)
        for row, request in enumerate(requests)
        if len(done[row]) < width
    ]
    rest = _by_row(engine.run(more), num_samples)
    return {row: (tokens + rest.get(row, ()))[:width] for row, tokens in done.items()}


def _by_row(generations: Iterable[Generation], num_samples: int) -> _New:
    """The new tokens of each row; the samples of a prompt follow one another. Raises PromptError: a row has failed."""
    done = list(generations)
    for row in done:
        row.check()
    return {int(row.request_id) * num_samples + row.sample: row.token_ids for row in done}


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse what `generate` hands to a model and an engine would not. Raises ConfigError, which names it."""
    unknown = {name for name, value in model_kwargs.items() if value is not None} - _MODEL_KWARGS
    unknown |= {name for name in _CACHES if getattr(model_kwargs.get(name), "_is_user_defined", False)}
    if unknown:
        raise ConfigError(
            f"emssd.custom_generate decodes from input_ids and attention_mask with a KV cache of its own; leave out "
            f"{', '.join(sorted(unknown))}"
        )


def _prompts_of(
    input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
) -> list[tuple[int, ...]]:
    """The rows without their padding, which must be on the left."""
    tensors = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
    shapes = {name: [*tensor.shape] for name, tensor in tensors.items() if tensor is not None}
    if input_ids.numel() == 0 or any(shape[-1] != input_ids.shape[1] for shape in shapes.values()):
        raise ConfigError(f"emssd.custom_generate wants one token at least, and tensors of one width, not {shapes}")
    mask = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
    if not (mask[:, -1] == 1).all() or (mask.diff(dim=1) < 0).any():
        raise ConfigError(
            "emssd.custom_generate wants every row padded on the left, or not at all, as decoder-only models do; "
            "set tokenizer.padding_side='left'"
        )
    if positions is not None and ((positions != mask.cumsum(dim=1) - 1) & (mask == 1)).any():
        raise ConfigError("emssd.custom_generate counts positions from 0 in every row; leave out position_ids")
    return [tuple(ids[keep == 1].tolist()) for ids, keep in zip(input_ids, mask, strict=True)]
