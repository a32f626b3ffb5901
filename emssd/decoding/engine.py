"""The decode loop: `Engine.step` is one step of lossless batched speculative decoding, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import Kept, PackedInputs
from emssd.data.prompts import check_prompt, encode_prompts, limit_per_prompt
from emssd.decoding.assembly import Parts, load_parts, make_parts, parts_around
from emssd.decoding.choosing import choices
from emssd.decoding.kept import with_hidden
from emssd.decoding.logprobs import token_logprobs
from emssd.decoding.packing import pack
from emssd.decoding.prefixes import Prefixes
from emssd.decoding.scheduler import ContinuousScheduler, Schedule, Scheduler
from emssd.decoding.step_stats import step_stats
from emssd.decoding.verdicts import verdicts
from emssd.decoding.verify import Verification, best_tokens, verify
from emssd.drafting import BudgetPolicy, Draft, Drafter, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import ConfigError, EmssdError, OutOfMemoryError, PluginError, PromptError
from emssd.metrics.stats import RunReport, StepStats
from emssd.metrics.timing import StepTimer, phase
from emssd.model import CausalLMRunner, ModelOutput, ModelRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request, Sequence, StopStrings, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine"]


class Engine:
    """Lossless speculative decoding of a batch: whatever drafts, the tokens are those of the target alone.

    Args:
        runner: the target with its KV cache.
        drafter: the drafter, or several in turn, each for the rows that those before it had nothing for.
        tokenizer: a Hugging Face tokenizer; without one, prompts are token ids and generations have no text.
        batch_size: rows decoded together.
        eos_token_ids: what ends a sequence.
        scheduler: who runs when; continuous batches of `batch_size` by default.
        budget: how much each row drafts; as much as the drafter wants by default.
        drafter_name, budget_name: how errors call the drafter and the budget policy.
        on_drafter_error: ``"disable"`` goes on without a drafter that fails, with a warning; ``"fail"`` raises.
        make_timer: makes what times a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | Seq[Drafter],
        *,
        tokenizer: Any = None,
        batch_size: int = 8,
        eos_token_ids: Iterable[int] = (),
        scheduler: Scheduler | None = None,
        budget: BudgetPolicy | None = None,
        drafter_name: str | None = None,
        budget_name: str | None = None,
        on_drafter_error: str = "disable",
        make_timer: Callable[[], StepTimer] = StepTimer,
    ) -> None:
        self.runner = runner
        drafters = [drafter] if isinstance(drafter, Drafter) else drafter
        checked = [
            each
            if isinstance(each, CheckedDrafter)
            else CheckedDrafter(each, drafter_name, runner.vocab_size, on_error=on_drafter_error)
            for each in drafters
        ]
        self.drafting = DraftStages(checked, budget or FixedBudget(), budget_name)
        runner.take_hidden(self.drafting.hidden_layers)
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = scheduler or ContinuousScheduler(batch_size)
        self.batch_size = self.scheduler.batch_size
        self.report = RunReport()
        self._make_timer = make_timer
        self._finished: list[Sequence] = []  # to be returned by `step`
        self._in_run = False

    @classmethod
    def from_pretrained(cls, path: str = "demo", **options: Any) -> Engine:
        """Load a model by folder or hub id; see `emssd.decoding.assembly.load_parts` for the options."""
        return cls._of(load_parts(path, **options))

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> Engine:
        """Wrap a loaded model; see `emssd.decoding.assembly.load_parts` for the options."""
        return cls._of(parts_around(model, tokenizer, **options))

    @classmethod
    def assemble(cls, target: TargetModel, tokenizer: Any, **choices: Any) -> Engine:
        """Build an engine for a model that is ready; see `emssd.decoding.assembly.make_parts` for the choices."""
        return cls._of(make_parts(target, tokenizer, **choices))

    @classmethod
    def _of(cls, parts: Parts) -> Engine:
        return cls(
            parts.runner,
            parts.drafters,
            tokenizer=parts.tokenizer,
            eos_token_ids=parts.eos_token_ids,
            scheduler=parts.scheduler,
            budget=parts.budget,
            budget_name=parts.budget_name,
        )

    @property
    def target(self) -> TargetModel:
        """The model that decodes, where the runner has one in this process."""
        assert isinstance(self.runner, CausalLMRunner), f"a {type(self.runner).__name__} has no model in this process"
        return self.runner.model

    @property
    def prefixes(self) -> Prefixes:
        """What rows that begin alike share: nothing if a drafter wants hidden states, as adopted tokens have none."""
        return Prefixes(None if self.drafting.hidden_layers else self.runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to decode, or to return."""
        return self.scheduler.has_work or bool(self._finished)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Draft, verify and commit once for the rows that the scheduler selects. Returns those that finished.

        All or nothing: after an exception, the next call goes on from where no step was lost or done in part. If a
        plugin fails once the tokens are there, the step counts, and the next call returns the rows that it finished.
        """
        if not self.scheduler.has_work:
            return self._handed_over()
        if not self._in_run:
            self.runner.begin()
        self._in_run = True
        with self._make_timer() as timer:
            schedule = self._schedule()
            draft = self.drafting.propose(schedule.batch, schedule.limits, schedule.num_prefill_tokens)
            known = draft.within(self.runner.vocab_size)
            packed = pack(schedule.batch, known, schedule.prefills)
            output = self.runner.run(packed)
            chosen = choices(output.logits, schedule.batch, known)
            drawn = verdicts(output.logits, schedule.batch, known)
            verification = verify(chosen, draft, best_tokens(output.logits, self.drafting.num_candidates), drawn)
            self.drafting.check_ids(draft, verification.drafted)
            logprobs = token_logprobs(output.logits, schedule.batch, draft, verification)
            self._advance(schedule, draft, verification, logprobs)
            outcome = with_hidden(verification.outcome(schedule.batch, draft), packed, output)
            self._in_run = self.scheduler.has_work
            self._conclude(outcome, self._stats(schedule, packed, output, outcome), timer)
        return self._handed_over()

    def stream(
        self,
        prompts: Iterable[str | Seq[int]],
        max_new_tokens: int | Seq[int] = 128,
        *,
        stop: Seq[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Generation]:
        """Decode `prompts` and yield each `Generation` as its row finishes, in finish order.

        Args:
            prompts: texts, or token ids of prompts already encoded.
            max_new_tokens: upper limit of new tokens, EOS included; one for all prompts, or one for each.
            stop: texts that end a sequence with the token that completes one; see `emssd.sequences.StopStrings`.
            ignore_eos: let only limits and stop strings end a sequence (for benchmarks).
            sampling: how tokens are chosen; greedily by default. The text of a prompt is a function of the model, the
                prompt, its place among `prompts`, and `sampling`; if ``n`` is above 1, also of the sample.

        Raises:
            ConfigError: a limit below one, not one limit per prompt, or stop strings that cannot be.
            PromptError: an empty or too long prompt, before anything runs.
        """
        encoded = encode_prompts(prompts, self.tokenizer)
        limits = limit_per_prompt(max_new_tokens, len(encoded))
        stops = StopStrings(stop, self.tokenizer) if stop else None
        eos = frozenset[int]() if ignore_eos else self.eos_token_ids
        pairs = enumerate(zip(encoded, limits, strict=True))
        return self.run([Request(str(i), tuple(ids), limit, eos, stops, sampling) for i, (ids, limit) in pairs])

    def generate(
        self,
        prompts: Iterable[str | Seq[int]],
        max_new_tokens: int | Seq[int] = 128,
        *,
        stop: Seq[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | None = None,
    ) -> list[Generation]:
        """Like `stream`, but returns all generations in one list, in the order of the prompts.

        With ``sampling.n`` above 1, the samples of a prompt follow one another: sample ``s`` of prompt ``i`` stands at
        ``i * n + s``.

        An `EmssdError` raised on the way carries what was finished before it in its attribute ``finished``.
        """
        done: dict[tuple[int, int], Generation] = {}
        try:
            for generation in self.stream(prompts, max_new_tokens, stop=stop, ignore_eos=ignore_eos, sampling=sampling):
                done[int(generation.request_id), generation.sample] = generation
        except EmssdError as error:
            error.finished = list(done.values())
            raise
        return [done[place] for place in sorted(done)]

    def run(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Decode requests, each for all of its samples; yields in finish order. Closing the iterator frees what runs.

        Raises:
            ConfigError: two requests have the same id, or the engine is still busy with other requests.
            PromptError: a request that the KV cache could not hold even alone, before anything runs.
        """
        requests = [sample for request in requests for sample in request.samples()]
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"two requests have the same request_id {twice[0]!r}; make them unique")
        return self._decode([self.sequence(request) for request in requests])

    def _decode(self, sequences: Seq[Sequence]) -> Iterator[Generation]:
        if self.scheduler.has_work:
            raise ConfigError("this engine is still decoding; use up or close the iterator that it gave before")
        self.report = RunReport()
        for sequence in sequences:
            self.scheduler.add(sequence)
        try:
            while self.scheduler.has_work:
                for sequence in self._step_in_memory():
                    yield Generation.of(sequence, self.tokenizer)
        except EmssdError:
            for sequence in self._handed_over():  # by a step that failed behind its tokens
                yield Generation.of(sequence, self.tokenizer)
            raise
        finally:
            with suppress(PluginError):  # what ended the run matters more than a drafter that cannot forget
                self.clear()

    def add(self, request: Request) -> None:
        """Queue all samples of one more request, also between two calls of `step`; for those who drive the loop.

        Raises:
            ConfigError: a request of the same id waits or runs.
            PromptError: see `sequence`.
        """
        samples = request.samples()
        for each in samples:
            if self.scheduler.knows(each.request_id):
                raise ConfigError(f"request {each.request_id!r} is there already; make request ids unique")
        for sequence in [self.sequence(each) for each in samples]:
            self.scheduler.add(sequence)

    def clear(self, request_ids: Collection[str] | None = None) -> None:
        """Drop these requests, or all that wait or run. Later ones may still begin with KV of theirs."""
        gone = request_ids
        self._finished = [row for row in self._finished if gone is not None and row.request_id not in gone]
        dropped = self.scheduler.clear(gone)
        self._in_run &= self.scheduler.has_work
        self._free(dropped)

    def sequence(self, request: Request) -> Sequence:
        """The sequence of `request` as it will begin.

        Raises:
            PromptError: its prompt cannot be used, or the KV cache could not hold it even alone.
            ConfigError: nothing may be generated, or `Request.sampling` speaks of tokens that there are not.
        """
        num_prompt, name = len(request.prompt_ids), request.request_id
        check_prompt(request.prompt_ids, self.runner.max_model_len, self.runner.vocab_size, name)
        if request.max_new_tokens < 1:
            raise ConfigError(f"request {name!r} has max_new_tokens {request.max_new_tokens}; it must be at least 1")
        if request.sampling is not None:
            request.sampling.check_vocabulary(self.runner.vocab_size)
        sequence = Sequence(request, max_length=min(num_prompt + request.max_new_tokens, self.runner.max_model_len))
        if not self.runner.fits({request.request_id: sequence.max_length}):
            raise PromptError(
                f"request {request.request_id} takes up to {sequence.max_length} tokens of KV cache, {num_prompt} of "
                f"them for its prompt, and there is no room for so many; raise kv_memory, or lower max_new_tokens"
            )
        return sequence

    def _step_in_memory(self) -> list[Sequence]:
        """`step`, with a word on what to lower when the device has no room left, and no silent end of the process."""
        try:
            return self.step()
        except torch.OutOfMemoryError as error:
            held = self.runner.usage
            raise OutOfMemoryError(
                f"{self.runner.device} is out of memory in a step of up to {self.batch_size} rows, with "
                f"{held.peak_pool / 2**30:.2f} GiB in the KV cache; lower kv_memory, batch_size or max_step_tokens. "
                f"Rows that were finished are kept"
            ) from error
        except SystemExit as error:
            raise PluginError(f"the model or the backend called sys.exit({error.code!r}) in a step") from error

    @phase("schedule")
    def _schedule(self) -> Schedule:
        """What this step computes; rows that lose their KV to others give it back."""
        schedule = self.scheduler.select(
            self.runner.fits, self.drafting.num_speculative_tokens, self.drafting.drafts_trees, self.prefixes
        )
        self._free(schedule.preempted)
        return schedule

    def _advance(
        self, schedule: Schedule, draft: Draft, verification: Verification, logprobs: Seq[Seq[TokenLogprob]]
    ) -> None:
        """Advance every row by its own acceptance, or none."""
        batch, pieces = schedule.batch, schedule.prefills
        prompts = [row for row in batch if row.num_uncached > 1] + [piece.sequence for piece in pieces]
        taken = [row.taken(tokens) for row, tokens in zip(batch, verification.new_tokens, strict=True)]
        num_accepted = [len(nodes) for nodes in verification.accepted]
        kept = [len(row.tokens) + number for row, number in zip(batch, num_accepted, strict=True)]
        kept += [piece.sequence.num_cached + piece.num_tokens for piece in pieces]
        names = (*batch.request_ids, *(piece.sequence.request_id for piece in pieces))
        sources: tuple[tuple[int, ...], ...] = ()
        if draft.parents is not None:
            moved = [_moved(len(row.tokens), nodes) for row, nodes in zip(batch, verification.accepted, strict=True)]
            sources = (*moved, *((),) * len(pieces)) if any(moved) else ()
        self.runner.commit(Kept(names, tuple(kept), sources))
        for row, drafted, accepted, ending, own in zip(
            batch, draft.lengths, num_accepted, taken, logprobs, strict=True
        ):
            row.advance(*ending, num_drafted=drafted, num_accepted=accepted, logprobs=own)
        for piece in pieces:
            piece.sequence.set_cached(piece.sequence.num_cached + piece.num_tokens)
        finished = [row for row in batch if row.finish_reason is not None]
        self.scheduler.retire(finished)
        self._finished += finished
        self.prefixes.publish(prompts)

    def _stats(self, schedule: Schedule, packed: PackedInputs, output: ModelOutput, outcome: Outcome) -> StepStats:
        usage, num_waiting = self.runner.usage, self.scheduler.num_waiting
        return step_stats(schedule, packed, output, outcome, usage, self.drafting.stats, num_waiting)

    def _conclude(self, outcome: Outcome, stats: StepStats, timer: StepTimer) -> None:
        """Tell drafters and policy of a step, free the rows that it finished, and count it; all, even if one fails."""
        finished = [row for row in outcome.batch if row.finish_reason is not None]
        with ExitStack() as always:  # the last line comes first
            always.callback(self._count, stats, timer)
            always.callback(self._free, finished)
            always.callback(self._learn, outcome, stats, timer)
            with phase("draft"):
                self.drafting.observe(outcome)

    @phase("schedule")
    def _learn(self, outcome: Outcome, stats: StepStats, timer: StepTimer) -> None:
        """The budget policy hears of the step; what that takes is time of the step, too."""
        self.drafting.learn(outcome, timer.timed(stats))

    def _count(self, stats: StepStats, timer: StepTimer) -> None:
        self.report.add(timer.timed(stats), self.batch_size)
        self.report.kv_usage = self.runner.usage

    def _handed_over(self) -> list[Sequence]:
        """Rows that finished and were not returned yet."""
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()  # an early close comes from outside of `step`, and a backend may write in place
    def _free(self, sequences: Seq[Sequence]) -> None:
        """Give back what backend and plugins hold of sequences that ended, or were preempted and will come again."""
        if sequences:
            request_ids = [sequence.request_id for sequence in sequences]
            self.prefixes.publish(sequences)
            for sequence in sequences:
                sequence.set_cached(0)
            self.runner.release(request_ids)
            self.drafting.release(request_ids)


def _moved(num_tokens: int, nodes: Seq[int]) -> tuple[int, ...]:
    """The KV of accepted `nodes` behind `num_tokens` tokens, as `Kept.sources`: nothing moves if they lie together."""
    return () if not nodes or nodes[-1] == len(nodes) - 1 else tuple(num_tokens + node for node in nodes)
