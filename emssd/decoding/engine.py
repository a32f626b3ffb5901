"""`Engine`: the ways into the decode loop, from prompts to generations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Self

import torch

from emssd.data.prompts import check_limit, check_prompt, encode_prompts, limit_per_prompt
from emssd.decoding.assembly import OF_A_LOADED_MODEL, find_plugins, make_parts, options_of
from emssd.decoding.loop import DecodeLoop
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
from emssd.errors import ConfigError, EmssdError, OutOfMemoryError, PluginError, PromptError
from emssd.hooks.registry import Registry, verification_rule
from emssd.metrics.stats import RunReport
from emssd.model import CausalLMRunner, TargetModel, load_model
from emssd.model.load.loading import LoadModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request, Row, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine", "RunReport"]


class Engine(DecodeLoop):
    """Lossless speculative decoding of a batch: whatever drafts, the tokens are those of the target alone.

    `from_pretrained` and `from_model` make one. `generate` and `stream` decode prompts, `run` decodes requests, and
    who drives the loop calls `add` and `step`.
    """

    @classmethod
    def from_pretrained(
        cls,
        path: str = "demo",
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        **options: Any,
    ) -> Self:
        """Load a model and make an engine for it.

        Args:
            path: local folder, hub id, or ``demo`` for the embedded model.
            drafter: a name such as ``"llma"``, a plugin's config such as ``LLMAConfig(copy_length=10)``, a `Drafter`,
                or a list of them, asked in turn.
            backend: a name or a plugin's config.
            budget: a name, a plugin's config, or a `BudgetPolicy`.
            options: fields of `ModelOptions`, such as ``dtype="float32"``, and of `EngineOptions`, such as
                ``batch_size=16``. With ``compile="auto"``, `generate` and `stream` also compile where a call is long
                enough. With ``tensor_parallel=True``, each process that torchrun started must make the same calls, with
                the same prompts; each gets the same tokens.
        """
        (model, chosen), registry = options_of({"path": path} | options), Registry()
        find_plugins(registry, drafter, backend, budget)
        return cls(**make_parts(*load_model(model), drafter, backend, budget, chosen, registry))

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        frozen: bool = False,
        **options: Any,
    ) -> Self:
        """Make an engine for a model that is already loaded, and in evaluation mode; see `from_pretrained`.

        The engine borrows the model: what it computes from the weights ends with each run, and a compiled program is
        made again. So you may train or edit the model between two runs.

        Args:
            frozen: you promise not to, so the engine keeps what it computes, as if it had loaded the model. It raises
                `UnsupportedModelError` where it sees a change; after `Engine.refresh`, it uses the model as it is then.
            options: fields of `EngineOptions`; and of `ModelOptions` ``max_model_len``, ``compile``, which is false by
                default, ``batch_invariant`` and ``trust_remote_code``.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"Engine.from_model takes a loaded model; Engine.from_pretrained({str(model)!r:.200}) loads one"
            )
        model_options, chosen = options_of({"compile": False} | options, OF_A_LOADED_MODEL)
        target = TargetModel(model, model_options, frozen=frozen)
        return cls(**make_parts(target, tokenizer, drafter, backend, budget, chosen, Registry()))

    @classmethod
    def assemble(
        cls,
        target: TargetModel,
        tokenizer: Any,
        *,
        drafter: Any,
        backend: Any,
        budget: Any = "adaptive",
        options: EngineOptions | None = None,
        registry: Registry | None = None,
        eos: Iterable[int] | None = None,
        load: LoadModel = load_model,
    ) -> Self:
        """Make an engine for `target`, which is ready to run.

        Args:
            drafter, backend, budget: as in `from_pretrained`.
            eos: what ends a sequence; what the model says by default.
            load: loads draft models.
        """
        chosen, registry = options or EngineOptions(), registry or Registry()
        return cls(**make_parts(target, tokenizer, drafter, backend, budget, chosen, registry, eos=eos, load=load))

    @property
    def target(self) -> TargetModel:
        """The model that decodes, where the runner has one in this process."""
        assert isinstance(self.runner, CausalLMRunner), f"a {type(self.runner).__name__} has no model in this process"
        return self.runner.model

    def step(self) -> list[Row]:
        """As `DecodeLoop.step`; says what to lower if memory runs out, and lets no ``sys.exit`` end the process."""
        try:
            return super().step()
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.runner.device} is out of memory in a step of up to {self.batch_size} rows, with "
                f"{self.runner.usage.peak_pool / 2**30:.2f} GiB in the KV cache; lower kv_memory, batch_size or "
                f"max_step_tokens. Rows that were finished are kept"
            ) from error
        except SystemExit as error:
            raise PluginError(f"the model or the backend called sys.exit({error.code!r}) in a step") from error

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
        if limits and isinstance(self.runner, CausalLMRunner):
            most = [min(limit, self.runner.max_model_len) for limit in limits]
            num_tokens = sum(most) * (1 if sampling is None else sampling.n)
            self.target.compile_if_it_pays(max(*most, num_tokens // self.batch_size))
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
        return [done[number] for number in sorted(done)]

    def run(self, requests: Iterable[Request], *, watch: Callable[[Row], None] | None = None) -> Iterator[Generation]:
        """Decode requests, each for all of its samples; yields in finish order. Closing the iterator frees what runs.

        Args:
            watch: gets each row after each step, to be read only: a text is there before its row has finished.

        Raises:
            ConfigError: two requests have the same id, or the engine is still busy with other requests.
            PromptError: a request that the KV cache could not hold even alone, before anything runs.
        """
        return _one_by_one(self.steps(requests, watch=watch))

    def steps(
        self, requests: Iterable[Request], *, watch: Callable[[Row], None] | None = None
    ) -> Generator[list[Generation], None, None]:
        """As `run`, but yields after each step, with all rows that it finished."""
        requests = [sample for request in requests for sample in request.samples()]
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"two requests have the same request_id {twice[0]!r}; make them unique")
        return self._decode([self.row(request) for request in requests], watch)

    def _decode(self, rows: Seq[Row], watch: Callable[[Row], None] | None) -> Generator[list[Generation], None, None]:
        if self.scheduler.has_work:
            raise ConfigError("this engine is still decoding; use up or close the iterator that it gave before")
        self.report = RunReport()
        for row in rows:
            self.scheduler.add(row)
        try:
            while self.scheduler.has_work:
                finished = self.step()
                for row in rows if watch is not None else ():
                    watch(row)
                yield [Generation.of(row, self.tokenizer) for row in finished]
        except EmssdError:
            yield [Generation.of(row, self.tokenizer) for row in self._handed_over()]  # of a step that counts
            raise
        finally:
            with suppress(PluginError):  # what ended the run matters more than a drafter that cannot forget
                self.clear()

    def add(self, request: Request) -> list[Row]:
        """Queue all samples of one more request, also between two calls of `step`. Returns their rows, to be read only.

        Raises:
            ConfigError: a request of the same id waits or runs.
            PromptError: see `row`.
        """
        samples = request.samples()
        for sample in samples:
            if self.scheduler.knows(sample.request_id):
                raise ConfigError(f"request {sample.request_id!r} is there already; make request ids unique")
        rows = [self.row(sample) for sample in samples]
        for row in rows:
            self.scheduler.add(row)
        return rows

    def refresh(self) -> None:
        """Take the model as it is now. An engine that owns its model keeps what it computed from the weights.

        Raises:
            ConfigError: the engine is decoding.
            UnsupportedModelError: its KV cache cannot serve the model any more.
        """
        if self.scheduler.has_work:
            raise ConfigError("this engine is decoding; refresh it when it has no more work")
        self.target.renew()

    def row(self, request: Request) -> Row:
        """The row of `request` as it will begin.

        Raises:
            PromptError: its prompt cannot be used, or the KV cache could not hold it even alone.
            ConfigError: nothing may be generated, or `Request.sampling` names tokens outside the vocabulary.
        """
        num_prompt, name = len(request.prompt_ids), request.request_id
        check_prompt(request.prompt_ids, self.runner.max_model_len, self.runner.vocab_size, name)
        check_limit(request.max_new_tokens, f"request {name!r} has max_new_tokens")
        if request.sampling is not None:
            request.sampling.check_vocabulary(self.runner.vocab_size)
            if request.sampling.is_residual:
                self.rule = verification_rule(request.sampling.method.value)
        row = Row(request, max_length=min(num_prompt + request.max_new_tokens, self.runner.max_model_len))
        if request.sampling is not None and request.sampling.grammar is not None:
            self._has_grammars = True
            row.grammar = self.grammars.begin(request.sampling.grammar, request.eos_token_ids or self.eos_token_ids)
            if self.force_tokens:
                self.drafting.force_tokens(self.runner.vocab_size)
        if not self.runner.fits({request.request_id: row.max_length}):
            raise PromptError(
                f"request {request.request_id} takes up to {row.max_length} tokens of KV cache, {num_prompt} of "
                f"them for its prompt, and there is no room for so many; raise kv_memory, or lower max_new_tokens"
            )
        return row


def _one_by_one(steps: Generator[list[Generation], None, None]) -> Iterator[Generation]:
    with closing(steps):
        for finished in steps:
            yield from finished
