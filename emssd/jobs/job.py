"""One run of the command line: load, decode with live figures, write, compare, report."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from emssd.console.terminal import plain_console
from emssd.data.openai_batch import OpenAIBatchConfig
from emssd.data.prompts import Prompt
from emssd.decoding.caches import make_backend
from emssd.decoding.check import CheckReport, compare
from emssd.decoding.distribution_check import check_distribution
from emssd.decoding.engine import Engine
from emssd.decoding.parallel import make_runner
from emssd.decoding.warmup import warm_up
from emssd.errors import ConfigError, PromptError
from emssd.jobs.batch_output import BATCH_OUTPUT, write_batch_output
from emssd.jobs.closing import print_texts, print_whole, remarks
from emssd.jobs.config import RunConfig
from emssd.jobs.experiment import label_of, setting_of
from emssd.jobs.intake import Failures, check_options, num_samples, prompts_of, to_requests
from emssd.jobs.output import OutputFolder
from emssd.jobs.progress import LiveFigures, show_messages
from emssd.jobs.provenance import hardware, machine_rates, plugins, versions
from emssd.jobs.resume import check_model, made_with, unfinished
from emssd.metrics.busy import OtherProcesses, cpu_times
from emssd.model.cache import ModelCache
from emssd.model.checkpoint import load_tokenizer
from emssd.plugins.registry import Registry
from emssd.report import print_check, print_failures, print_report
from emssd.sequences import Generation, Request

__all__ = ["JobResult", "make_engine", "run_job", "write_answers"]


@dataclass(frozen=True)
class JobResult:
    """What a run leaves behind.

    Attributes:
        metrics: as in ``metrics.json``; of a job that is resumed with nothing left to do, those that it has.
        generations: of the rows of this run, in the order of the prompts.
        engine: that ran; ``None`` if nothing was left to do.
    """

    metrics: dict[str, Any]
    generations: Seq[Generation] = ()
    engine: Engine | None = None


@dataclass(frozen=True)
class _Work:
    """What a run has to do: `requests`, samples of `prompts` (by id); some prompts may be among `failures`.

    `every` prompt of the job also counts those that were done before.
    """

    engine: Engine
    requests: list[Request]
    prompts: dict[str, Prompt]
    failures: Failures
    every: Seq[Prompt]


def run_job(
    config: RunConfig,
    output_dir: Path,
    config_text: str,
    registry: Registry,
    *,
    models: ModelCache | None = None,
    brief: bool = False,
    alone: bool = True,
) -> JobResult:
    """Run `config`.

    Args:
        config: the options.
        output_dir: where its files go.
        config_text: the options as ``config.yaml`` will have them.
        registry: the plugins.
        models: that are loaded already, for runs one after the other.
        brief: show progress only, and leave the tables to the caller.
        alone: no other runs are compared with it. Of those that are, none compiles where another would not.

    Raises:
        EmssdError: for whatever the user can mend; rows that were finished by then are in the output folder.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    check_options(config)
    registry.in_use.clear()  # what earlier runs of a sweep used
    own_threads = _own_threads()  # read before it is changed
    torch.set_num_threads(config.num_threads or own_threads)
    console, models = plain_console(stderr=True), models or ModelCache()
    show_messages(console)
    with OutputFolder(output_dir, resume=config.resume, overwrite=config.overwrite) as output:
        quiet = plain_console(stderr=True, quiet=brief)
        work = _prepare(config, config_text, output, quiet, registry, models, alone=alone)
        if work is None:
            return JobResult(output.read_metrics())
        output.begin(config_text, work.failures.prompts, made_with(config))
        warm_up(work.engine, work.requests)
        num_before, num_here = len(output.finished), len(work.requests)
        live = LiveFigures(console, "decoding", num_before + num_here, done=num_before, show=config.progress)
        done, figures = _decode(work, live, output)
        counts = {"num_prompts": num_before + num_here, "num_resumed_prompts": num_before}
        counts["num_failed_prompts"] = len(work.failures.prompts)
        metrics = _describe(config, work.engine, registry) | counts | figures
        output.write_metrics(metrics)  # now, so that an interrupted comparison does not lose them
        write_answers(config, output, work.every, work.failures)
        report = None
        if config.check is not None:
            report, greedy = _compare_with_plain(config, work, done, console, registry, models)
            metrics |= _check_metrics(report, metrics, greedy)
            output.write_metrics(metrics)
    result = JobResult(metrics, [done[_place(request)] for request in work.requests], work.engine)
    _print_results(config, work, result, report, output, brief=brief)
    return result


def _print_results(
    config: RunConfig, work: _Work, result: JobResult, report: CheckReport | None, output: OutputFolder, *, brief: bool
) -> None:
    """Print what came out; if `brief`, only what is wrong. It goes to stdout, unless the rows do."""
    console, on_the_way = plain_console(stderr=output.is_stdout), plain_console(stderr=True)
    if brief:
        if report is not None and (report.differences or not (report.law is None or report.law.is_right)):
            print_check(console, report, config.check and config.check.value)
        return
    has_figures = config.prompt is None if config.figures is None else config.figures
    if config.prompt is not None and not output.is_stdout:
        print_whole(console, result.generations)
    if has_figures:
        print_report(console, result.metrics, _plain_label(config))
    if config.prompt is None:
        print_texts(console, [(work.prompts[row.request_id], row) for row in result.generations])
    if report is not None:
        print_check(console, report, config.check and config.check.value)
    drafts = config.speculate and config.drafter.name != "none"
    for remark in remarks(result.metrics, drafts=drafts) if has_figures else ():
        console.print(remark, style="yellow", highlight=False)
    print_failures(console, work.failures.prompts)
    files = ["generations.jsonl", "metrics.json", "config.yaml"]
    files += ["errors.jsonl"] if work.failures.prompts else []
    files += [BATCH_OUTPUT] if isinstance(config.data, OpenAIBatchConfig) else []
    if not output.is_stdout:
        said = console if has_figures else on_the_way
        said.print(f"written to {output.path}/: {', '.join(files)}", highlight=False)


def _plain_label(config: RunConfig) -> str:
    """What the run is called that this one is compared with."""
    return "plain greedy" if config.sampling.temperature == 0 else "plain"


@cache
def _own_threads() -> int:
    """PyTorch's own choice, for the jobs of a sweep that leave it; those before may have set another."""
    import torch

    return torch.get_num_threads()


def _prepare(
    config: RunConfig,
    config_text: str,
    output: OutputFolder,
    console: Console,
    registry: Registry,
    models: ModelCache,
    *,
    alone: bool,
) -> _Work | None:
    """Read and check all prompts before anything runs; ``None`` if a resumed job has nothing left to do."""
    failures = Failures(config.on_error, config.data)
    prompts = failures.passed(prompts_of(config, registry))
    registry.find("backend", config.backend.name)
    left = unfinished(prompts, output, config, config_text)
    if config.resume:
        num_done, num_rows = len(output.finished), sum(num_samples(config, prompt) for prompt in prompts)
        there = f"{num_done} of {num_rows} rows" if num_done else "no rows, so this is a fresh start"
        console.print(f"resume=true: {output.path}/ holds {there}", highlight=False)
    if output.finished and not left:
        if config.check is not None and "check" not in output.read_metrics():
            raise ConfigError(
                f"check={config.check.value} compares the rows that a run decodes, and {output.path} holds all; "
                f"leave check= out, or decode them again with overwrite=true"
            )
        write_answers(config, output, prompts, failures)
        console.print("nothing is left to do")
        return None
    console.print(f"loading {config.model.path} …", highlight=False)
    engine = make_engine(config, registry, models, num_steps=partial(_most_steps, config, left) if alone else None)
    check_model(config, output)  # again: to load it may have brought newer files from the hub
    if config.model.compile == "auto":
        console.print(engine.target.why_compiled, highlight=False, soft_wrap=True)
    if not engine.eos_token_ids and not config.ignore_eos and not config.stop:
        console.print("the model names no EOS token: only max_new_tokens ends a row", style="yellow")
    requests = to_requests(config, engine, left, failures, output.finished)
    if requests:
        return _Work(engine, requests, {prompt.prompt_id: prompt for prompt in left}, failures, prompts)
    output.write_errors(failures.prompts)
    write_answers(config, output, prompts, failures)
    print_failures(console, failures.prompts)
    if output.finished:
        console.print("nothing else is left to do")
        return None
    raise PromptError(f"none of the {len(failures.prompts)} prompts can be used; {output.says_why} says why")


def write_answers(config: RunConfig, output: OutputFolder, prompts: Seq[Prompt], failures: Failures) -> None:
    """Write what an OpenAI batch is answered with, once all of its rows are there; nothing for other prompts."""
    if isinstance(config.data, OpenAIBatchConfig):
        model = config.model
        tokenizer = partial(load_tokenizer, model.path, trust_remote_code=model.trust_remote_code)
        write_batch_output(output.path, prompts, failures.prompts, model.path, tokenizer)


def _most_steps(config: RunConfig, prompts: Seq[Prompt], longest: int) -> int:
    """So many steps the rows of `prompts` take without drafts, in a model of `longest` tokens, if none ends early."""
    ends = [0] * min(config.batch_size, sum(num_samples(config, each) for each in prompts))
    for each in prompts:
        limit = min(each.max_new_tokens or config.max_new_tokens, longest)
        for _ in range(num_samples(config, each)):
            heapq.heapreplace(ends, ends[0] + limit)  # in the place of the batch that is free first
    return max(ends, default=0)


def make_engine(
    config: RunConfig,
    registry: Registry,
    models: ModelCache,
    *,
    baseline: Engine | None = None,
    num_steps: Callable[[int], int] | None = None,
) -> Engine:
    """The engine of `config`, or plain decoding with the target of `baseline`.

    Given `num_steps`, which says how many it has to do at most with sequences of some length, ``model.compile=auto``
    may compile the model.
    """
    if baseline is not None:
        target, tokenizer = baseline.target, baseline.tokenizer
    else:
        target, tokenizer = models.target(**vars(config.model))
        if num_steps is not None:
            target.compile_if_it_pays(num_steps(target.max_model_len))
        if config.experiment is not None:
            machine_rates(target.device, target.dtype)  # for its row; now, while no KV cache takes the memory it needs
    return Engine.assemble(
        target,
        tokenizer,
        drafter="none" if baseline is not None or not config.speculate else config.drafter,
        backend=config.backend,
        budget=config.budget,
        options=config,
        registry=registry,
        load=partial(models.draft, trust_remote_code=config.model.trust_remote_code),
    )


def _compare_with_plain(
    config: RunConfig,
    work: _Work,
    done: dict[tuple[str, int], Generation],
    console: Console,
    registry: Registry,
    models: ModelCache,
) -> tuple[CheckReport, dict[str, Any]]:
    """Decode the requests plainly with the same target and compare. Returns the verdict and the plain run's metrics.

    The tokens of rows with `residual` sampling are not those of the plain run; these are tested for their law.
    """
    target = work.engine.target
    greedy = dataclasses.replace(work, engine=make_engine(config, registry, models, baseline=work.engine))
    warm_up(greedy.engine, greedy.requests)
    live = LiveFigures(
        console,
        _plain_label(config),
        len(work.requests),
        show=config.progress,
    )
    expected, figures = _decode(greedy, live)
    spec = target.kv_cache_spec(1)
    judge = make_runner(target, make_backend(spec, config.backend, registry), spec, config.backend, registry)
    sampling = {request.prompt_id: request.sampling for request in work.requests}
    drawn = {name: params for name, params in sampling.items() if params is not None and params.is_residual}
    places = [_place(request) for request in work.requests]
    same = [place for place in places if place[0] not in drawn]
    report = compare([done[place] for place in same], [expected[place] for place in same], judge, sampling)
    tested = [done[place] for place in places if place[0] in drawn]
    law = check_distribution(tested, judge, drawn) if tested else None
    return dataclasses.replace(report, law=law), figures


def _decode(
    work: _Work, live: LiveFigures, output: OutputFolder | None = None
) -> tuple[dict[tuple[str, int], Generation], dict[str, Any]]:
    """Decode all requests under live figures; rows are written as they finish. Gives all by `_place`, and metrics."""
    done: dict[tuple[str, int], Generation] = {}
    spread = work.engine.target.shard is not None
    with live, OtherProcesses(partial(cpu_times, siblings=spread)) as others:
        for generation in work.engine.run(work.requests):
            done[generation.request_id, generation.sample] = generation
            if output is not None:
                output.write_generation(work.prompts[generation.request_id], generation)
            live.row_done(work.engine.report)
    return done, work.engine.report.metrics() | {"other_cpu_share": others.share}


def _place(request: Request) -> tuple[str, int]:
    """By which a request and its generation are found: the id of the prompt, and the sample."""
    return request.prompt_id, request.sample


def _describe(config: RunConfig, engine: Engine, registry: Registry) -> dict[str, Any]:
    """What ran, on what."""
    import torch

    target = engine.target
    cuda = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    made_up = " (random weights)" if config.model.architecture else ""
    setting = setting_of(config)
    where = f"{cuda or target.device}" + (f", {target.shard.group.size} processes" if target.shard else "")
    return {
        "title": f"{config.model.path}{made_up} · drafter={setting['drafter']} · backend={label_of(config.backend)} · "
        f"budget={label_of(config.budget)} · "
        f"batch {config.batch_size} · {str(target.dtype).removeprefix('torch.')} on {where}",
        "setting": setting,
        "versions": versions(),
        "plugins": plugins(registry),
        "hardware": hardware(target.device),
        "compiled": target.why_compiled,
    }


def _check_metrics(report: CheckReport, metrics: dict[str, Any], greedy: dict[str, Any]) -> dict[str, Any]:
    law = (
        {}
        if (found := report.law) is None
        else {"law": {**dataclasses.asdict(found), "p_value": found.p_value, "right": found.is_right}}
    )
    return {
        "greedy": greedy,
        "check": {
            "exact": report.num_exact,
            "ties": len(report.ties),
            "differences": len(report.true_differences),
            "details": [
                {name.replace("request_id", "id"): value for name, value in dataclasses.asdict(difference).items()}
                for difference in report.differences
            ],
            **law,
        },
        "speedup": metrics["decode_tokens_per_second"] / max(greedy["decode_tokens_per_second"], 1e-9),
        "speedup_end_to_end": metrics["tokens_per_second"] / max(greedy["tokens_per_second"], 1e-9),
    }
