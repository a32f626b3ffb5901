"""The runs of one command: a single one, or those of a sweep, which callbacks compare."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from emssd.cli.config import RunConfig
from emssd.cli.terminal import plain_console
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError, EmssdError, GroupError
from emssd.hooks.registry import Registry

if TYPE_CHECKING:
    from emssd.cli.job import JobResult
    from emssd.model.load.loading import ModelCache
    from emssd.model.run.parallel import Group

__all__ = ["Jobs", "SweepCallback", "SweptRun", "differs"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        options: ``None`` where they could not be.
        overrides: ``NAME=VALUE``.
        number: its place among the `total` runs of the sweep, from 0.
        result: ``None`` of a run that has not ended, or failed.
        error: why it failed.
    """

    options: RunConfig | None
    overrides: Seq[str]
    folder: Path
    number: int = 0
    total: int = 1
    result: JobResult | None = None
    error: str | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        return self.result.metrics if self.result is not None else {}


class SweepCallback(Callback):
    """A callback of Hydra, named under ``hydra.callbacks``, that sees the runs of a sweep.

    The command line composes all runs before the first begins, and Hydra calls `on_job_end` then, with None as the
    return value. When a run has ended, the command line calls it again, with the `SweptRun`; and when all have,
    `on_multirun_end`. These two calls may raise errors of emssd.
    """

    def is_done(self, run: SweptRun) -> bool:
        """Whether a run of an experiment need not be decoded. Raises ConfigError: it cannot be compared."""
        return False

    def close(self) -> None:
        """Close files; also called after an error."""


class Jobs:
    """Runs one job after the other; models stay loaded.

    Attributes:
        callbacks: of the command, made when the first job is composed.
        found_difference: whether ``check=`` found tokens that are not those of the model alone.
        in_order: whether this process has all runs of a sweep, and so goes on after one that failed.
        config: of the last job that was composed.
        group: of processes that run the jobs together, once they have joined.
    """

    def __init__(self, registry: Registry) -> None:
        self.callbacks: list[SweepCallback] = []
        self.found_difference = self.in_order = False
        self.config = DictConfig({})
        self.group: Any = None
        self._registry = registry
        self._models: ModelCache | None = None
        self._num_done, self._errors = 0, list[str]()

    @property
    def is_silent(self) -> bool:
        """Whether rank 0 prints and writes for this process."""
        return self.group is not None and self.group.rank > 0

    def attempt(self, run: SweptRun, do: Callable[[], _Result]) -> _Result | None:
        """The result of `do`, or ``None``: an error of ours ends one run of a sweep, and the others go on."""
        try:
            return do()
        except EmssdError as error:
            if not self.in_order or isinstance(error, GroupError):  # no run can be without the process that has ended
                raise
            self._errors.append(str(error))
            plain_console(stderr=True).print(f"failed: {error}", soft_wrap=True)
            self._notify(dataclasses.replace(run, error=str(error)))
            return None

    def run(self, config: RunConfig, config_text: str, output_dir: Path, swept: SweptRun | None = None) -> None:
        """One run with its own tables; or one of a sweep, which callbacks may have done before."""
        group = self._join(config)
        from emssd.cli.intake import check_options  # here, because these bring torch, which --help does not need
        from emssd.cli.job import run_job
        from emssd.model.load.loading import ModelCache

        self._models = self._models or ModelCache()
        is_compared = False
        if swept is not None and config.experiment is not None:
            is_compared, run = True, swept
            check_options(config)
            if group.made_by_first(lambda: any(callback.is_done(run) for callback in self.callbacks)):
                self._num_done += 1
                return
            # Half a run has no figures of its own, and one whose drafter was switched off has those of no drafter.
            config = dataclasses.replace(config, resume=False, overwrite=True, on_drafter_error=OnDrafterError.fail)
        do = partial(
            run_job, config, output_dir, config_text, self._registry, models=self._models, brief=is_compared,
            alone=swept is None, group=group,
        )  # fmt: skip
        result = do() if swept is None else self.attempt(swept, do)
        if result is None:
            return
        self.found_difference |= differs(result.metrics)
        if swept is not None:
            self._num_done += 1
            self._notify(dataclasses.replace(swept, result=result))

    def _notify(self, run: SweptRun) -> None:
        if self.is_silent:
            return
        ended = JobReturn(overrides=run.overrides, working_dir=str(run.folder), status=JobStatus.COMPLETED)
        ended.return_value = run
        for callback in self.callbacks:
            callback.on_job_end(self.config, ended)

    def _join(self, config: RunConfig) -> Group:
        """The processes that run this job together, of which only rank 0 is heard."""
        from emssd.model.run.parallel import Group, join

        if config.model.tensor_parallel:
            self.group = join()
            if self.is_silent:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until this process ends
        elif "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, and each would decode everything; add "
                f"model.tensor_parallel=true to spread the model over them"
            )
        return self.group or Group()

    def close(self) -> None:
        """Let others write to the folder of the experiment."""
        for callback in self.callbacks:
            callback.close()

    def finish(self) -> ConfigError | None:
        """Let the callbacks compare the runs. Returns an error: runs failed."""
        for callback in self.callbacks if not self.is_silent else ():
            callback.on_multirun_end(self.config)
        if not self._errors:
            return None
        if not self._num_done and len({*self._errors}) == 1:
            return ConfigError(self._errors[0])
        return ConfigError(
            f"{len(self._errors)} of {self._num_done + len(self._errors)} runs failed; once their causes are mended, "
            f"the same command with resume=true makes them"
        )


def differs(metrics: Mapping[str, Any]) -> bool:
    """Whether `check` has found that the rows of a run are not those of the model alone."""
    check = metrics.get("check", {})
    return bool(check.get("differences")) or not check.get("law", {}).get("right", True)
