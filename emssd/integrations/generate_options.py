"""Reads what `generate` hands to `emssd.custom_generate`: as `SamplingParams` and ends of a row, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as of
from transformers.generation import stopping_criteria as ends

from emssd.errors import ConfigError
from emssd.sampling import SamplingParams

__all__ = [
    "Criteria", "check_config", "check_ngrams", "check_processors", "limits", "of_strings",
    "sampling_of", "token_ids",
]  # fmt: skip

# Fields that are followed: lengths and ends as stopping criteria; minimum lengths as processors, which must have no
# effect; the others here.
HONOURED = {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "eos_token_id"}
HONOURED |= {"do_sample", "num_return_sequences", "temperature", "top_k", "top_p", "min_p", "typical_p", "pad_token_id"}
HONOURED |= {"repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "sequence_bias", "bad_words_ids"}

# Fields without effect on the tokens of decoding without beams, an assistant, or a cache of Transformers'.
HARMLESS = {"use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile"}
HARMLESS |= {"continuous_batching_config", "low_memory", "early_stopping", "length_penalty", "renormalize_logits"}
HARMLESS |= {"output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"}
HARMLESS |= {"bos_token_id", "decoder_start_token_id", "transformers_version"}
HARMLESS |= {"is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
HARMLESS |= {"assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"}
_OF_SAMPLING = {"top_h", "epsilon_cutoff", "eta_cutoff"}  # without sampling, any value is harmless

# Values of other fields that change nothing, beside None and False.
_ONE = ["num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"]
NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(_ONE, (1,)) | dict.fromkeys(["min_length", "min_new_tokens"], (0,))
NEUTRAL |= {
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static"),
}


def check_config(config: GenerationConfig, refused: Set[str] = frozenset()) -> None:
    """Refuse each field that is neither honoured, harmless nor neutral. Raises ConfigError: the field and its value.

    Args:
        refused: fields that are neither honoured nor harmless here.
    """
    fresh: Any = GenerationConfig()  # type: ignore[no-untyped-call]  # it has no annotations
    free = (HONOURED | HARMLESS) - refused | (set[str]() if config.do_sample else _OF_SAMPLING)
    for name in sorted(name for name in vars(fresh).keys() - free if not name.startswith("_")):
        value = getattr(config, name, None)
        if value is not None and value is not False and value not in NEUTRAL.get(name, ()):
            raise ConfigError(f"emssd cannot honour {name}={value}; leave it out, or call generate without emssd")


def check_processors(config: GenerationConfig, processors: Iterable[Any] | None, padding: Seq[int], width: int) -> None:
    """Refuse logits processors that Transformers does not make of the fields of `sampling_of`.

    `padding` has the number ``[B]`` of each row's tokens of padding.
    """
    seen, others = set[type](), list[str]()
    for processor in processors or ():
        kind = type(processor)
        has_no_effect = kind is of.LogitNormalization  # probabilities are normalised anyway
        has_no_effect |= kind is of.MinLengthLogitsProcessor and processor.min_length <= width
        if not has_no_effect and (kind in seen or not _is_of(processor, config, padding)):
            others.append(kind.__name__)
        seen.add(kind)
    if others:
        raise ConfigError(
            f"emssd.custom_generate applies no logits processors but those of its sampling options; these were asked "
            f"for: {', '.join(others)}"
        )


def check_ngrams(config: GenerationConfig, padding: Iterable[Seq[int]], rows: Iterable[Seq[int]]) -> None:
    """Refuse rows that `generate` would go on with in another way, as its n-grams are also those of padding.

    Args:
        padding: ``[B]`` what stands to the left of each row.
        rows: ``[B]`` the tokens of each, as far as they are known and others follow.
    """
    size = config.no_repeat_ngram_size
    if size and any(left and (size == 1 or set(left) & set(row)) for left, row in zip(padding, rows, strict=True)):
        raise ConfigError(
            f"Transformers counts padding for no_repeat_ngram_size={size}, and emssd.custom_generate does not, so that "
            f"a row with its padding's token in its text would differ; pad with another token, or give rows without "
            f"padding"
        )


def sampling_of(config: GenerationConfig, seed: int | None) -> SamplingParams | None:
    """The sampling options; ``None`` is greedy. Without a `seed`, PyTorch's global generator gives one."""
    temperature, names = 0.0, ["repetition_penalty", "no_repeat_ngram_size"]
    if config.do_sample:
        temperature = 1.0 if config.temperature is None else config.temperature
        names += ["top_k", "top_p", "min_p", "typical_p"]
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
    options: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    options |= {"logit_bias": _bias(config), "seed": 0 if seed is None else seed}
    params = SamplingParams(temperature=temperature, **options)
    return None if params.is_greedy else params


def _bias(config: GenerationConfig) -> dict[int, float]:
    """The numbers that are added to the logits of single tokens. Raises ConfigError: a sequence of several tokens."""
    biases = _pairs(config)
    eos = token_ids(config.eos_token_id)
    bad = [tuple(ids) for ids in config.bad_words_ids or () if len(ids) != 1 or ids[0] not in eos]
    for name, sequences in (("sequence_bias", biases), ("bad_words_ids", bad)):
        if long := [list(ids) for ids in sequences if len(ids) != 1]:
            raise ConfigError(
                f"emssd honours {name} for single tokens, and {long[0]} is a sequence; leave it out, or call generate "
                f"without emssd"
            )
    forbidden = [*(ids[0] for ids in bad), *token_ids(config.suppress_tokens)]
    return {int(ids[0]): float(bias) for ids, bias in biases.items()} | dict.fromkeys(forbidden, float("-inf"))


def _pairs(config: GenerationConfig) -> dict[tuple[int, ...], float]:
    """The biased sequences, which Transformers takes as a dictionary or as pairs."""
    pairs = config.sequence_bias or {}
    return dict(pairs) if isinstance(pairs, dict) else {tuple(ids): bias for ids, bias in pairs}


def token_ids(value: Any) -> list[int]:
    """A field of one token or of several as a list."""
    ids: list[int] = torch.as_tensor([] if value is None else value).flatten().tolist()
    return ids


def _is_of(processor: Any, config: GenerationConfig, padding: Seq[int]) -> bool:
    """Whether `processor` does what a field says that `sampling_of` follows."""
    values: dict[type, tuple[Any, Any]] = {  # of its own, and of the field that stands for it
        of.RepetitionPenaltyLogitsProcessor: ("penalty", config.repetition_penalty),
        of.NoRepeatNGramLogitsProcessor: ("ngram_size", config.no_repeat_ngram_size),
        of.SuppressTokensLogitsProcessor: ("suppress_tokens", config.suppress_tokens),
        of.SequenceBiasLogitsProcessor: ("sequence_bias", _pairs(config)),
        of.NoBadWordsLogitsProcessor: ("bad_word_ids", config.bad_words_ids),
    }
    if config.do_sample:
        values |= {
            of.TemperatureLogitsWarper: ("temperature", config.temperature),
            of.TopKLogitsWarper: ("top_k", config.top_k),
            of.TopPLogitsWarper: ("top_p", config.top_p),
            of.MinPLogitsWarper: ("min_p", config.min_p),
            of.TypicalLogitsWarper: ("mass", config.typical_p),
        }
    name, wanted = values.get(type(processor), (None, None))
    if name is None:
        return False
    value = getattr(processor, name)
    if name == "penalty":  # it must spare padding
        ignored = processor.prompt_ignore_length
        if ([0] * len(padding) if ignored is None else token_ids(ignored)) != list(padding):
            return False
    return token_ids(value) == token_ids(wanted) if isinstance(value, torch.Tensor) else bool(value == wanted)


class Criteria:
    """Stop strings and a time as `emssd.sequences.Stop`, for one row; they see the `padding` on its left, too."""

    def __init__(self, criteria: Seq[Any], padding: Seq[int]) -> None:
        self.time_is_over = False
        self._criteria = criteria
        self._padding = list(padding)
        self._window = max(getattr(item, "maximum_token_len", 1) for item in criteria)

    def completed_by_last(self, tokens: Seq[int], start: int) -> bool:
        """Whether the row ends here; as in Transformers, a stop string may begin in the prompt."""
        seen = [*self._padding, *tokens] if len(tokens) < self._window else tokens
        ids = torch.tensor([seen[-self._window :]])
        met = [type(item) for item in self._criteria if item(ids, None)[0]]
        self.time_is_over = ends.MaxTimeCriteria in met
        return bool(met)

    def text_before(self, output: Seq[int]) -> str:
        """Nothing: `generate` gives ids, and nobody reads a text."""
        return ""


def limits(config: GenerationConfig, criteria: Iterable[Any] | None) -> tuple[int, list[int], list[Any]]:
    """The maximum length, padding of the inputs included; the EOS ids in the caller's order; and other criteria."""
    lengths, eos, others = list[int](), list[int](), list[Any]()
    for item in criteria or ():
        # A caller's own criterion of these types replaces the one that `generate` made of the config.
        if type(item) is ends.MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is ends.EosTokenCriteria:
            eos.extend(item.eos_token_id.flatten().tolist())
        elif type(item) in (ends.StopStringCriteria, ends.MaxTimeCriteria):
            others.append(item)
        else:
            raise ConfigError(
                f"emssd.custom_generate stops at EOS, a maximum length, stop strings and a maximum time; asked for: "
                f"{type(item).__name__}"
            )
    return min(lengths, default=int(config.max_length)), eos, others


def of_strings(strings: str | Seq[str] | None, tokenizer: Any) -> list[Any]:
    """The criterion of stop strings, if there are any. Raises ConfigError: no texts, or no tokenizer."""
    if strings is None:
        return []
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, list | tuple) or not strings or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop_strings are {strings}; give texts of at least one character, or leave them out")
    if tokenizer is None:
        raise ConfigError(
            "stop_strings need the model's tokenizer, and Transformers keeps tokenizer= from custom functions; pass it "
            "as draft_tokenizer= to generate"
        )
    return [ends.StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))]
