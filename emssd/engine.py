"""The decode loop: `Engine.step` is one step of lossless batched speculative decoding, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import AttentionBackend, Kept
from emssd.draft import Draft, Drafter, Outcome, check_draft
from emssd.errors import ConfigError, DraftError, EmssdError, PluginError
from emssd.model import TargetModel
from emssd.packing import pack
from emssd.prompts import encode_prompts
from emssd.scheduler import Scheduler, StaticScheduler
from emssd.sequence import Batch, FinishReason, Request, Sequence
from emssd.stats import RunReport, StepStats, StepTimer
from emssd.verify import Verification, verify_greedy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine", "Generation"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        request_id: for prompts given to `Engine.generate`, the prompt's index as text.
        text: the new tokens decoded without special tokens; ``None`` if the engine has no tokenizer.
        num_steps, num_drafted, num_accepted: verification steps, tokens drafted, and drafted tokens accepted.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length τ of this request, the target's own token included."""
        return 1.0 + self.num_accepted / self.num_steps


class Engine:
    """Lossless speculative decoding of a batch: whatever drafts, the tokens are those of the target alone.

    Args:
        target: the model.
        backend: attention backend, already allocated for `target`.
        drafter: the drafter.
        tokenizer: a Hugging Face tokenizer; without one, prompts are token ids and generations have no text.
        batch_size: rows decoded together.
        eos_token_ids: what ends a sequence.
        scheduler: who runs when; static batches of `batch_size` by default.
        drafter_name: how errors call the drafter.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: AttentionBackend,
        drafter: Drafter,
        *,
        tokenizer: Any = None,
        batch_size: int = 8,
        eos_token_ids: Iterable[int] = (),
        scheduler: Scheduler | None = None,
        drafter_name: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        self.target = target
        self.backend = backend
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = scheduler or StaticScheduler(batch_size)
        self.drafter_name = drafter_name or type(drafter).__name__
        self.report = RunReport()

    @classmethod
    def from_pretrained(cls, path: str = "demo", **options: Any) -> Engine:
        """Load a model by folder or hub id; see `emssd.assembly.from_pretrained` for the options."""
        from emssd import assembly

        return assembly.from_pretrained(path, **options)

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> Engine:
        """Wrap a loaded model; see `emssd.assembly.from_model` for the options."""
        from emssd import assembly

        return assembly.from_model(model, tokenizer, **options)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Draft, verify and commit once for the rows that the scheduler selects. Returns those that finished."""
        timer = StepTimer()
        batch = self.scheduler.select()
        with timer.phase("draft"):
            draft = self._propose(batch)
        with timer.phase("plan"):
            packed = pack(batch, draft, self.target.device)
            plan = self.backend.plan(packed)
        with timer.phase("forward"):
            logits = self.target(plan, self.backend)
        with timer.phase("verify"):
            verification = verify_greedy(logits, draft)
        num_new_tokens, kv_padding = self._commit(batch, draft, verification)
        with timer.phase("draft"):
            self._observe(Outcome(batch, draft, verification.accepted))
        finished = [row for row in batch if row.finish_reason is not None]
        self._retire(finished)
        self.report.add(
            StepStats(
                is_prefill=packed.num_tokens > len(batch) + draft.indptr[-1],
                num_tokens=packed.num_tokens,
                num_new_tokens=num_new_tokens,
                drafted=tuple(draft.lengths),
                acceptance=tuple(len(tokens) for tokens in verification.new_tokens),
                input_padding=plan.num_padding,
                kv_padding=kv_padding,
                seconds=timer.finish(),
            )
        )
        self.report.kv_usage = self.backend.kv_usage
        return finished

    def stream(
        self, prompts: Iterable[str | Seq[int]], max_new_tokens: int = 128, *, ignore_eos: bool = False
    ) -> Iterator[Generation]:
        """Decode `prompts` and yield each `Generation` as its row finishes, in finish order.

        Args:
            prompts: texts, or token ids of prompts already encoded.
            max_new_tokens: upper limit of new tokens per prompt; EOS counts.
            ignore_eos: let only the limits end a sequence (for benchmarks).

        Raises:
            PromptError: an empty or too long prompt, before anything runs.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        encoded = encode_prompts(prompts, self.tokenizer, self.target.max_model_len, self.target.vocab_size)
        eos = frozenset[int]() if ignore_eos else self.eos_token_ids
        requests = [Request(str(i), tuple(ids), max_new_tokens, eos) for i, ids in enumerate(encoded)]
        return self.run(requests)

    def generate(
        self, prompts: Iterable[str | Seq[int]], max_new_tokens: int = 128, *, ignore_eos: bool = False
    ) -> list[Generation]:
        """Like `stream`, but returns all generations in the order of the prompts.

        An `EmssdError` raised on the way carries what was finished before it in its attribute ``finished``.
        """
        done: dict[str, Generation] = {}
        try:
            for generation in self.stream(prompts, max_new_tokens, ignore_eos=ignore_eos):
                done[generation.request_id] = generation
        except EmssdError as error:
            error.finished = list(done.values())  # type: ignore[attr-defined]  # an extra for whoever catches it
            raise
        return [done[str(i)] for i in range(len(done))]

    def run(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Decode requests; yields in finish order. Closing the iterator early frees what still runs.

        Raises:
            ConfigError: two requests have the same id, or the engine is still busy with other requests.
        """
        if self.scheduler.has_work:
            raise ConfigError("this engine is still decoding; use up or close the iterator that it gave before")
        requests = list(requests)
        if len({request.request_id for request in requests}) < len(requests):
            raise ConfigError("two requests have the same request_id; make them unique")
        self.report = RunReport()
        for request in requests:
            self.scheduler.add(request)
        try:
            while self.scheduler.has_work:
                for sequence in self.step():
                    yield self._generation(sequence)
        finally:
            while self.scheduler.has_work:
                with suppress(PluginError):  # what ended the run matters more than a drafter that cannot forget
                    self._retire(list(self.scheduler.select()))

    def _propose(self, batch: Batch) -> Draft:
        budget = tuple(self.scheduler.budget(batch, self.drafter.num_speculative_tokens, self.target.max_model_len))
        before = [len(row.tokens) for row in batch]
        try:
            draft = self.drafter.propose(batch, budget)
        except Exception as error:
            raise PluginError(f"drafter {self.drafter_name} failed in propose: {error!r}") from error
        try:
            if not isinstance(draft, Draft):
                raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.draft.Draft")
            if before != [len(row.tokens) for row in batch]:
                raise DraftError("it changed the tokens of the batch, which it may only read")
            check_draft(draft, batch, budget, self.target.vocab_size)
        except DraftError as error:
            raise DraftError(f"drafter {self.drafter_name} broke its interface: {error}") from error
        return draft

    def _commit(self, batch: Batch, draft: Draft, verification: Verification) -> tuple[int, int]:
        """Advance every row by its own acceptance. Returns the new tokens and the KV slots lost to padding."""
        num_before = sum(len(row.tokens) for row in batch)
        for row, drafted, tokens in zip(batch, draft.lengths, verification.new_tokens, strict=True):
            row.num_cached = len(row.tokens) + len(tokens) - 1  # all but the target's own newest token
            row.num_steps += 1
            row.num_drafted += drafted
            row.num_accepted += len(tokens) - 1
            row.extend(tokens)
            if row.finish_reason is None and len(row.tokens) >= self.target.max_model_len:
                row.finish_reason = FinishReason.LENGTH
        kv_padding = self.backend.commit(Kept(batch.request_ids, tuple(row.num_cached for row in batch)))
        return sum(len(row.tokens) for row in batch) - num_before, kv_padding

    def _observe(self, outcome: Outcome) -> None:
        try:
            self.drafter.observe(outcome)
        except Exception as error:
            raise PluginError(f"drafter {self.drafter_name} failed in observe: {error!r}") from error

    @torch.inference_mode()  # an early close comes from outside of `step`, and a backend may write in place
    def _retire(self, sequences: list[Sequence]) -> None:
        if sequences:
            request_ids = [sequence.request_id for sequence in sequences]
            self.scheduler.retire(sequences)
            self.backend.release(request_ids)
            try:
                self.drafter.release(request_ids)
            except Exception as error:
                raise PluginError(f"drafter {self.drafter_name} failed in release: {error!r}") from error

    def _generation(self, sequence: Sequence) -> Generation:
        assert sequence.finish_reason is not None
        output = tuple(sequence.output_ids)
        text = None if self.tokenizer is None else self.tokenizer.decode(output, skip_special_tokens=True)
        return Generation(
            request_id=sequence.request_id,
            prompt_ids=sequence.request.prompt_ids,
            token_ids=output,
            text=text,
            finish_reason=sequence.finish_reason,
            num_steps=sequence.num_steps,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
        )
