"""The rows of a run from several workers, by Ray Data; this process reads prompts and writes rows."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

from emssd.cli.config import ClusterConfig, OnError, RunConfig
from emssd.cli.intake import Failures, to_requests
from emssd.cli.output import OutputFolder
from emssd.cli.progress import LiveFigures
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.errors import ConfigError, EmssdError, PromptError
from emssd.integrations.installed import check_installed
from emssd.integrations.ray import EngineActor
from emssd.plugins.registry import Registry
from emssd.sequences import Generation

__all__ = ["ClusterFigures", "check_cluster", "decode_on_cluster"]


class ClusterFigures:
    """Sums over the rows of this run."""

    def __init__(self) -> None:
        self.num_rows = self.num_new_tokens = self.num_steps = self.num_accepted = 0
        self.seconds = 0.0
        self._start = time.monotonic()

    def add(self, row: Generation) -> None:
        self.num_rows += 1
        self.num_new_tokens += len(row.token_ids)
        self.num_steps += row.num_steps
        self.num_accepted += row.num_accepted
        self.seconds = time.monotonic() - self._start

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / max(self.seconds, 1e-9)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted / max(self.num_steps, 1)


def check_cluster(config: RunConfig, cluster: ClusterConfig) -> None:
    """Refuse options that no cluster could run with."""
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


def decode_on_cluster(
    config: RunConfig,
    cluster: ClusterConfig,
    left: Seq[Prompt],
    output: OutputFolder,
    failures: Failures,
    live: LiveFigures,
) -> ClusterFigures:
    """Write the rows of `left` that are not finished as they come from the workers.

    Ray gives the prompts of a worker that dies to another one. A row is written once, when it arrives.
    """
    by_id = {prompt.prompt_id: prompt for prompt in left}
    figures = ClusterFigures()
    with live, _ray(cluster) as ray:
        for prompt_id, answer in _answers(ray, config, cluster, left, output.finished):
            if isinstance(answer, PromptError):
                failures.add(FailedPrompt(prompt_id, str(answer)))
            elif isinstance(answer, EmssdError):
                raise answer
            else:
                for row in answer:
                    output.write_generation(by_id[prompt_id], row)
                    figures.add(row)
                    live.row_done(figures.tokens_per_second, figures.mean_acceptance_length)
    return figures


def _answers(
    ray: Any,
    config: RunConfig,
    cluster: ClusterConfig,
    left: Seq[Prompt],
    finished: Mapping[tuple[str, int], Any],
) -> Iterator[tuple[str, list[Generation] | EmssdError]]:
    """By id the rows of each prompt, or its error, in the order in which tasks end."""
    done: dict[str, set[tuple[str, int]]] = {prompt.prompt_id: set() for prompt in left}
    for place in finished:
        if place[0] in done:
            done[place[0]].add(place)
    items = [{"item": pickle.dumps((prompt, done[prompt.prompt_id]))} for prompt in left]
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


class _Worker(EngineActor):
    def __init__(self, config: RunConfig) -> None:
        import torch

        from emssd.cli.engines import make_engine
        from emssd.model.loading import ModelCache

        self._config, self._fault = config, None
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        try:
            super().__init__(make_engine(config, Registry(), ModelCache()))
        except EmssdError as error:  # Ray would start the actor again and again
            self._fault = error

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """``{"answer": [B]}`` for ``{"item": [B]}``, all pickled."""
        tasks = [self._answer(*pickle.loads(item)) for item in batch["item"]]
        return {"answer": [pickle.dumps(answer) for answer in await asyncio.gather(*tasks)]}

    async def _answer(self, prompt: Prompt, done: set[tuple[str, int]]) -> tuple[str, list[Generation] | EmssdError]:
        if self._fault is not None:
            return prompt.prompt_id, self._fault
        try:
            requests = to_requests(self._config, self.engine, [prompt], Failures(OnError.fail), done)
            return prompt.prompt_id, await self.decode(requests)
        except EmssdError as error:
            return prompt.prompt_id, error


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
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _line(error: BaseException) -> str:
    """The last line with text: Ray's errors hold the traceback of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
