"""The ends of a row of `emssd.custom_generate`: criteria of Transformers, asked about one row, token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["Criteria", "limits", "of_strings", "streamed"]


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
        ended = [bool(item(ids, None)[0]) for item in self._criteria]
        self.time_is_over = any(over for item, over in zip(self._criteria, ended, strict=True) if _is_time(item))
        return any(ended)

    def text_before(self, output: Seq[int]) -> str:
        """Nothing: `generate` gives ids, and nobody reads a text."""
        return ""


def limits(config: GenerationConfig, criteria: Iterable[Any] | None) -> tuple[int, list[int], list[Any]]:
    """The maximum length, padding of the inputs included; the EOS ids in the caller's order; and other criteria."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

    lengths, eos, others = list[int](), list[int](), list[Any]()
    for item in criteria or ():
        # A caller's own criterion of these types replaces the one that `generate` made of the config.
        if type(item) is MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is EosTokenCriteria:
            eos.extend(item.eos_token_id.flatten().tolist())
        elif type(item) is StopStringCriteria or _is_time(item):
            others.append(item)
        else:
            raise ConfigError(
                f"emssd.custom_generate stops at EOS, a maximum length, stop strings and a maximum time; asked for: "
                f"{type(item).__name__}"
            )
    return min(lengths, default=int(config.max_length)), eos, others


def of_strings(strings: str | Iterable[str] | None, tokenizer: Any) -> list[Any]:
    """The criterion of stop strings, if there are any. Raises ConfigError: no texts, or no tokenizer."""
    from transformers.generation.stopping_criteria import StopStringCriteria

    if strings is None:
        return []
    strings = [strings] if isinstance(strings, str) else list(strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"stop_strings are {strings}; give texts of at least one character, or leave them out")
    if tokenizer is None:
        raise ConfigError(
            "stop_strings need the model's tokenizer, and Transformers keeps tokenizer= from custom functions; pass it "
            "as draft_tokenizer= to generate"
        )
    return [StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)]


def _is_time(item: Any) -> bool:
    from transformers.generation.stopping_criteria import MaxTimeCriteria

    return type(item) is MaxTimeCriteria


def streamed(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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
