"""A run on several workers, by Ray Data: this process reads prompts and writes rows, the workers' engines decode."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emssd.console.terminal import plain_console
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.errors import ConfigError, EmssdError, PromptError
from emssd.integrations.installed import check_installed
from emssd.jobs.config import ClusterConfig, OnError, RunConfig
from emssd.jobs.experiment import setting_of
from emssd.jobs.intake import Failures, check_options, num_samples, prompts_of, to_requests
from emssd.jobs.job import JobResult, make_engine, write_answers
from emssd.jobs.output import OutputFolder
from emssd.jobs.progress import LiveFigures, show_messages
from emssd.jobs.provenance import versions
from emssd.jobs.resume import made_with, unfinished
from emssd.plugins.registry import Registry
from emssd.report import print_failures
from emssd.sequences import Generation

__all__ = ["run_on_cluster"]


@dataclass
class _Figures:
    """What the rows of this run add up to."""

    num_rows: int = 0
    num_new_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def add(self, row: Generation, seconds: float) -> None:
        self.num_rows += 1
        self.num_new_tokens += len(row.token_ids)
        self.num_steps += row.num_steps
        self.num_accepted += row.num_accepted
        self.seconds = seconds

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / max(self.seconds, 1e-9)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted / max(self.num_steps, 1)


def run_on_cluster(config: RunConfig, output_dir: Path, config_text: str, registry: Registry) -> JobResult:
    """Run `config` on the workers of `config.cluster`; arguments and files are those of `run_job`.

    Prompts go out in tasks. Ray gives the tasks of a worker that dies to another one, and a row is written when it
    arrives, once, whatever died.

    Raises:
        EmssdError: for whatever the user can mend; rows that were finished by then are in the output folder.
    """
    cluster = config.cluster
    assert cluster is not None
    check_options(config)
    _check_cluster(config, cluster)
    console = plain_console(stderr=True)
    show_messages(console)
    with OutputFolder(output_dir, resume=config.resume, overwrite=config.overwrite) as output:
        failures = Failures(config.on_error, config.data)
        prompts = failures.passed(prompts_of(config, registry))
        left = unfinished(prompts, output, config, config_text)
        num_before, num_rows = len(output.finished), sum(num_samples(config, prompt) for prompt in prompts)
        if config.resume:
            console.print(f"resume=true: {output.path}/ holds {num_before} of {num_rows} rows", highlight=False)
        figures = _Figures()
        if left:
            output.begin(config_text, failures.prompts, made_with(config))
            console.print(f"starting {cluster.workers} workers with {config.model.path} …", highlight=False)
            live = LiveFigures(console, "decoding", num_rows, done=num_before, show=config.progress)
            with live, _ray(cluster) as ray:
                _decode(ray, config, cluster, left, output, failures, figures, live)
        if left or failures.prompts:
            output.write_errors(failures.prompts)
        write_answers(config, output, prompts, failures)
        print_failures(console, failures.prompts)
        if not output.finished and not figures.num_rows:
            raise PromptError(f"none of the {len(failures.prompts)} prompts can be used; {output.says_why} says why")
        if not figures.num_rows:
            console.print("nothing is left to do")
            return JobResult(output.read_metrics())
        metrics = _metrics(config, figures, num_before, len(failures.prompts))
        output.write_metrics(metrics)
    said = f"{figures.num_rows} rows, {figures.num_new_tokens} tokens in {figures.seconds:.1f} s"
    written = "" if output.is_stdout else f"; written to {output.path}/"
    plain_console(stderr=output.is_stdout).print(
        f"{said}, {figures.tokens_per_second:.0f} tokens/s, τ {figures.mean_acceptance_length:.2f}, on "
        f"{cluster.workers} workers{written}",
        highlight=False,
    )
    return JobResult(metrics)


def _check_cluster(config: RunConfig, cluster: ClusterConfig) -> None:
    check_installed("ray")
    if config.check is not None:
        raise ConfigError("check compares runs of one process; leave check= or cluster= out")
    if config.model.tensor_parallel:
        raise ConfigError("cluster=ray gives each worker a model that is whole; leave it or model.tensor_parallel out")
    for name, least in (("workers", 1), ("prompts_per_task", 1)):
        if getattr(cluster, name) < least:
            raise ConfigError(f"cluster.{name} is {getattr(cluster, name)}; it must be at least {least}")
    if cluster.cpus <= 0 or cluster.gpus < 0:
        raise ConfigError(
            f"cluster.cpus is {cluster.cpus} and cluster.gpus {cluster.gpus}; a worker needs some of the first, and "
            f"none or some of the second"
        )


@contextmanager
def _ray(cluster: ClusterConfig) -> Iterator[Any]:
    """Ray, connected to the cluster or started on this machine for as long as the run takes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run asks nothing of the network
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters is raised as well
    import ray
    import ray.data  # its logger is set up when it is imported

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    if address:
        options["address"] = address
    else:
        options |= {"include_dashboard": False, "num_cpus": max(1, round(cluster.workers * cluster.cpus + 0.5))}
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot use Ray{f' at {address}' if address else ''}: {_line(error)}") from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _decode(
    ray: Any,
    config: RunConfig,
    cluster: ClusterConfig,
    left: Seq[Prompt],
    output: OutputFolder,
    failures: Failures,
    figures: _Figures,
    live: LiveFigures,
) -> None:
    """Write the rows of `left` as they come."""
    by_id = {prompt.prompt_id: prompt for prompt in left}
    written = set(output.finished)
    start = time.monotonic()
    for prompt_id, answer in _answers(ray, config, cluster, left, output.finished):
        if isinstance(answer, PromptError):
            failures.add(FailedPrompt(prompt_id, str(answer)))
        elif isinstance(answer, EmssdError):
            raise answer
        else:
            for row in answer:
                assert (prompt_id, row.sample) not in written, f"row {prompt_id!r} came twice"
                written.add((prompt_id, row.sample))
                output.write_generation(by_id[prompt_id], row)
                figures.add(row, time.monotonic() - start)
                live.row_done(figures)


def _answers(
    ray: Any,
    config: RunConfig,
    cluster: ClusterConfig,
    left: Seq[Prompt],
    finished: Mapping[tuple[str, int], Any],
) -> Iterator[tuple[str, list[Generation] | EmssdError]]:
    """By id what became of each prompt, in the order in which tasks end."""
    done: dict[str, list[int]] = {}
    for prompt_id, sample in finished:
        done.setdefault(prompt_id, []).append(sample)
    items = [{"item": pickle.dumps((prompt, done.get(prompt.prompt_id, [])))} for prompt in left]
    num_tasks = -(-len(items) // cluster.prompts_per_task)
    answers = ray.data.from_items(items, override_num_blocks=num_tasks).map_batches(
        _Worker,
        fn_constructor_args=(config,),
        # Of two tasks at a time, one fills the batch while the last rows of the other end.
        compute=ray.data.ActorPoolStrategy(size=cluster.workers, max_concurrent_calls_per_actor=2),
        batch_size=None,  # a whole task
        num_cpus=cluster.cpus,
        num_gpus=cluster.gpus,
    )
    try:
        for batch in answers.iter_batches(batch_size=None, prefetch_batches=0):
            for answer in batch["answer"]:
                yield pickle.loads(answer)
    except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
        raise EmssdError(f"Ray could not finish the run: {_line(error)}. Rows that were finished are kept") from error


class _Worker:
    """Decodes tasks; an actor of Ray Data.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        import torch

        from emssd.integrations.engine_thread import EngineThread
        from emssd.model.cache import ModelCache

        self._config, self._fault = config, None
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        try:
            self._thread = EngineThread(make_engine(config, Registry(), ModelCache()))
        except EmssdError as error:  # Ray would start the actor again and again
            self._fault = error

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """``{"answer": [B]}`` for ``{"item": [B]}``, all pickled."""
        tasks = [self._answer(*pickle.loads(item)) for item in batch["item"]]
        return {"answer": [pickle.dumps(answer) for answer in await asyncio.gather(*tasks)]}

    async def _answer(self, prompt: Prompt, finished: list[int]) -> tuple[str, list[Generation] | EmssdError]:
        if self._fault is not None:
            return prompt.prompt_id, self._fault
        failures, engine = Failures(OnError.skip), self._thread.engine
        done = {(prompt.prompt_id, sample) for sample in finished}
        try:
            requests = to_requests(self._config, engine, [prompt], failures, done)
            if failures.prompts:
                raise PromptError(failures.prompts[0].error)
            futures = [future for request in requests for future in self._thread.submit(request)]
            return prompt.prompt_id, await asyncio.gather(*map(asyncio.wrap_future, futures))
        except EmssdError as error:
            return prompt.prompt_id, error


def _metrics(config: RunConfig, figures: _Figures, num_before: int, num_failed: int) -> dict[str, Any]:
    assert config.cluster is not None
    return {
        "title": f"{config.model.path} on {config.cluster.workers} workers",
        "setting": setting_of(config),
        "versions": versions(),
        "num_workers": config.cluster.workers,
        "num_prompts": num_before + figures.num_rows,
        "num_resumed_prompts": num_before,
        "num_failed_prompts": num_failed,
        "num_new_tokens": figures.num_new_tokens,
        "seconds": {"total": figures.seconds},
        "tokens_per_second": figures.tokens_per_second,
        "mean_acceptance_length": figures.mean_acceptance_length,
    }


def _line(error: BaseException) -> str:
    """The last line that says something: Ray's errors hold the traceback of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
