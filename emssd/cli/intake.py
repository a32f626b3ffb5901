"""From options to an engine, and from prompts to its requests: encoded, cut, with limits; and which cannot be run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import cache

from emssd.cli.config import DecodeConfig, OnError, RunConfig, prompt_source
from emssd.cli.provenance import machine_rates
from emssd.data.chat import encode_chat, require_template
from emssd.data.prompts import FailedPrompt, Prompt, SourceConfig, Truncate, checked, encode_text, truncated, unescaped
from emssd.data.records import content_of, text_in
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, PromptError, did_you_mean
from emssd.hooks.registry import Registry
from emssd.model.load.loading import ModelCache
from emssd.sampling.params import MOST_SAMPLES, SamplingParams
from emssd.sequences import Generation, Request, StopStrings

__all__ = [
    "Failures", "check_options", "make_engine", "most_steps", "num_samples", "prompts_of", "sampling_of",
    "template_of", "to_requests",
]  # fmt: skip

_LONGEST_ID = 19  # digits of a token id that no model has


class Failures:
    """Prompts that failed, in order; the first one ends the run unless `on_error` is ``skip``.

    With `answers`, which have a place for errors, ``auto`` is ``skip``.
    """

    def __init__(self, on_error: OnError, *, answers: bool = False) -> None:
        self._skips = on_error is OnError.skip or (answers and on_error is OnError.auto)
        self.prompts: list[FailedPrompt] = []

    def add(self, failed: FailedPrompt) -> None:
        """Remember one. Raises PromptError: failures are not to be skipped."""
        if not self._skips:
            raise PromptError(failed.error)
        self.prompts.append(failed)

    def add_row(self, generation: Generation) -> bool:
        """Remember the prompt of a row that has an error, once for all of its samples. Returns whether it has one."""
        try:
            generation.check()
        except PromptError as error:
            if (failed := FailedPrompt(generation.request_id, str(error))) not in self.prompts:
                self.add(failed)
            return True
        return False

    def passed(self, prompts: Iterable[Prompt | FailedPrompt]) -> list[Prompt]:
        """Return the prompts that a source could read, and remember the others."""
        good: dict[str, Prompt] = {}
        for number, item in enumerate(prompts):
            prompt = item if isinstance(item, FailedPrompt) else checked(item, f"#{number}")
            name = prompt.prompt_id
            if isinstance(prompt, FailedPrompt):
                self.add(prompt)
            elif name in good:
                self.add(FailedPrompt(name, f"there are two prompts {name!r}; ids tell rows apart, so give others"))
            else:
                good[name] = prompt
        return list(good.values())


def check_options(config: RunConfig) -> None:
    """Refuse options that no prompt could run with, before anything is loaded."""
    if isinstance(config.data, SourceConfig):
        if config.data.chat and config.data.truncate is not Truncate.none:
            raise ConfigError(
                f"data.truncate={config.data.truncate.value} would cut the chat template of data.chat=true; leave it "
                f"out, and let on_error=skip pass over conversations that are too long"
            )
        if config.data.system is not None and not config.data.chat:
            raise ConfigError("data.system is a message of a conversation; add data.chat=true, or leave it out")
    if hasattr(config.data, "temperature") and config.sampling.temperature:
        raise ConfigError(
            f"sampling.temperature is {config.sampling.temperature}; with data={config.data.name} each request names "
            f"its own, and data.temperature is that of the others"
        )
    config.model.check()
    sampling_of(config)
    if config.resume and config.overwrite:
        raise ConfigError("resume=true keeps the rows of the output folder, overwrite=true drops them; choose one")


def sampling_of(
    config: DecodeConfig, prompt: Prompt | None = None, vocab_size: int | None = None
) -> SamplingParams | None:
    """The sampling of the run, or of `prompt` in it; ``None`` is greedy. Raises PromptError for an invalid option of
    the prompt.
    """
    options = {name: value for name, value in vars(config.sampling).items() if name != "name"}
    of_prompt = {} if prompt is None or prompt.sampling is None else prompt.sampling
    of_prompt = {name: value for name, value in of_prompt.items() if value is not None}  # as tables fill gaps
    try:
        for name in of_prompt:
            if name not in options:
                guess = did_you_mean(name, options) or "."
                raise ConfigError(f"{name} is no option{guess} The options are {', '.join(options)}")
        if isinstance(bias := of_prompt.get("logit_bias"), dict):
            of_prompt["logit_bias"] = {
                int(token) if token.isdecimal() and len(token) < _LONGEST_ID else token: value
                for token, value in bias.items()
            }
        params = SamplingParams(**options | of_prompt)
        if vocab_size is not None:
            params.check_vocabulary(vocab_size)
    except ConfigError as error:
        if of_prompt and prompt is not None:
            raise PromptError(f"prompt {prompt.prompt_id}: sampling.{error}") from error
        raise ConfigError(f"sampling.{error}") from error
    return None if params.is_greedy and params.logprobs is None else params


def make_engine(
    config: DecodeConfig,
    registry: Registry,
    models: ModelCache,
    *,
    baseline: Engine | None = None,
    num_steps: Callable[[int], int] | None = None,
) -> Engine:
    """The engine of `config`, or plain decoding with the target of `baseline`.

    With `num_steps`, a function from the longest sequence to the most steps, ``model.compile=auto`` may compile.
    """
    if baseline is not None:
        target, tokenizer = baseline.target, baseline.tokenizer
    else:
        target, tokenizer = models.target(config.model)
        if num_steps is not None:
            target.compile_if_it_pays(num_steps(target.max_model_len))
        if isinstance(config, RunConfig) and config.experiment is not None:
            machine_rates(target.device, target.dtype)  # for its row; now, while no KV cache takes the memory it needs
    plain = baseline is not None or not config.speculate
    return Engine.assemble(
        target,
        tokenizer,
        drafter="none" if plain else config.drafter,
        backend=config.backend,
        budget=config.budget,
        options=replace(config, force_tokens=False) if plain else config,
        registry=registry,
        load=models.load,
    )


def prompts_of(config: RunConfig, registry: Registry) -> Iterable[Prompt | FailedPrompt]:
    """The prompts of a run: `prompt`, or those of its source."""
    if config.prompt is not None:
        return [Prompt("0", config.prompt)]
    prompts: Iterable[Prompt | FailedPrompt] = registry.build("data", prompt_source(config, registry), config.data)
    return prompts


def num_samples(config: RunConfig, prompt: Prompt) -> int:
    """The number of rows of `prompt`; 1 if it asks for an invalid number, which `sampling_of` refuses."""
    number = (prompt.sampling or {}).get("n")
    number = config.sampling.n if number is None else number
    return number if isinstance(number, int) and 0 < number <= MOST_SAMPLES else 1


def most_steps(config: RunConfig, prompts: Iterable[Prompt], longest: int) -> int:
    """The most steps that `prompts` take without drafts, in a model of `longest` tokens."""
    limits = [
        min(prompt.max_new_tokens or config.max_new_tokens, longest)
        for prompt in prompts
        for _ in range(num_samples(config, prompt))
    ]
    ends = [0] * min(config.batch_size, len(limits))
    for limit in limits:
        heapq.heapreplace(ends, ends[0] + limit)  # in the row of the batch that is free first
    return max(ends, default=0)


def template_of(config: DecodeConfig) -> str | None:
    """The text of the file that `chat_template` names."""
    return None if config.chat_template is None else text_in(*content_of(config.chat_template, "chat_template="))


def to_requests(
    config: DecodeConfig,
    engine: Engine,
    prompts: Iterable[Prompt],
    failures: Failures,
    finished: Container[tuple[str, int]] = (),
) -> list[Request]:
    """Encode, cut and check all prompts before anything runs; those that cannot run go to `failures`.

    A request is one sample of a prompt; `finished` ones, by id of the prompt and index of the sample, are left out.
    """
    template, source = template_of(config), getattr(config, "data", None)
    if not isinstance(source, SourceConfig):  # of a server, or of a plugin, which may cut its prompts in its own way
        source = SourceConfig()
    if source.chat:
        require_template(engine.tokenizer, template)
    stops = cache(lambda strings: StopStrings(strings, engine.tokenizer) if strings else None)
    common = tuple(map(unescaped, config.stop))
    stops(common)  # an error of these is the run's, and no prompt's
    eos = frozenset[int]() if config.ignore_eos else engine.eos_token_ids
    requests = []
    for prompt in prompts:
        limit = config.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens
        try:
            ids = _encoded(source, engine, prompt, limit, template)
            sampling = sampling_of(config, prompt, engine.runner.vocab_size)
            stop = stops(common if prompt.stop is None else prompt.stop)
            request = Request(prompt.prompt_id, tuple(ids), limit, eos, stop, sampling)
            engine.row(request)  # can the model go on from it, and is there room for it alone?
        except PromptError as error:
            failures.add(FailedPrompt(prompt.prompt_id, str(error)))
        except ConfigError as error:
            if (prompt.stop, prompt.max_new_tokens, (prompt.sampling or {}).get("grammar")) == (None, None, None):
                raise
            failures.add(FailedPrompt(prompt.prompt_id, f"prompt {prompt.prompt_id}: {error}"))
        else:
            requests += [row for row in request.samples() if (prompt.prompt_id, row.sample) not in finished]
    return requests


def _encoded(options: SourceConfig, engine: Engine, prompt: Prompt, limit: int, template: str | None) -> list[int]:
    name, messages = prompt.prompt_id, prompt.messages
    if messages is None and options.chat and prompt.text:
        messages = ({"role": "user", "content": prompt.text},)
    if prompt.token_ids is not None:
        ids = list(prompt.token_ids)
    elif messages is None:
        ids = encode_text(prompt.text, engine.tokenizer, name)
    else:
        ids = encode_chat(messages, engine.tokenizer, name, options.system, template)
    return truncated(ids, options, engine.runner.max_model_len - limit, name)
