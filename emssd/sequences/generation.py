"""`Generation`: the result of a finished request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emssd.errors import PromptError
from emssd.sequences.row import FinishReason, Row, TokenLogprob

__all__ = ["Generation"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        request_id: of the request; for prompts given to `Engine.generate`, the prompt's index as text.
        token_ids: the new tokens; an EOS, and the token that completed a stop string, included.
        text: the new tokens decoded without special tokens, up to where a stop string begins; ``None`` if the engine
            has no tokenizer.
        seed: of a sampled request; ``None`` where nothing was drawn.
        num_steps, num_drafted, num_accepted: verification steps, tokens drafted, and drafted tokens accepted.
        sample: which of the ``sampling.n`` texts of the request it is, from 0.
        logprobs: of each new token, if the request asks for them.
        error: why the row ended before its time, with ``finish_reason`` ``error``: its grammar had come to a dead end.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    num_steps: int
    num_drafted: int
    num_accepted: int
    seed: int | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length τ of this request, the target's own token included."""
        return 1.0 + self.num_accepted / self.num_steps

    def check(self) -> None:
        """Raises PromptError: the row has an `error`."""
        if self.error is not None:
            raise PromptError(f"prompt {self.request_id}: {self.error}")

    @classmethod
    def of(cls, row: Row, tokenizer: Any) -> Generation:
        """The result of a finished row; without a `tokenizer` there is no text."""
        assert row.finish_reason is not None
        request, sampling, output = row.request, row.request.sampling, tuple(row.output_ids)
        text, error = None, None if row.grammar is None else row.grammar.error
        if request.stop is not None and row.finish_reason is FinishReason.STOP:
            text = request.stop.text_before(output)
        elif tokenizer is not None:
            text = tokenizer.decode(output, skip_special_tokens=True)
        return cls(
            request_id=request.prompt_id,
            prompt_ids=request.prompt_ids,
            token_ids=output,
            text=text,
            finish_reason=row.finish_reason if error is None else FinishReason.ERROR,
            num_steps=row.num_steps,
            num_drafted=row.num_drafted,
            num_accepted=row.num_accepted,
            seed=sampling.seed if sampling is not None and sampling.temperature else None,
            sample=request.sample,
            logprobs=None if sampling is None or sampling.logprobs is None else row.logprobs,
            error=error,
        )
