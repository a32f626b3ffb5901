"""One run of the command line: load, decode with live figures, write, compare, report."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from emssd.assembly import assemble, make_backend
from emssd.check import CheckReport, compare
from emssd.config import RunConfig
from emssd.engine import Engine, Generation
from emssd.errors import ConfigError
from emssd.model import load_model
from emssd.output import OutputFolder
from emssd.prompts import Prompt, SourceConfig, encode_prompts, truncated
from emssd.registry import Registry
from emssd.report import print_check, print_report
from emssd.sequence import Request
from emssd.stats import RunReport

__all__ = ["run_job"]

_WARM_UP_TOKENS = 4  # new tokens of the untimed run that fills caches and starts thread pools


def run_job(config: RunConfig, output_dir: Path, config_text: str, registry: Registry) -> dict[str, Any]:
    """Run `config` and return its metrics.

    Raises:
        EmssdError: for whatever the user can mend; rows that were finished by then are in the output folder.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no annotations
    _check_numbers(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    console = Console()
    with OutputFolder(output_dir, config_text) as output:
        prompts: list[Prompt] = list(registry.find("data", config.data.name).build(config.data))
        registry.find("backend", config.backend.name)
        console.print(f"loading {config.model.path} …", highlight=False)
        engine = _engine(config, registry)
        if not engine.eos_token_ids and not config.ignore_eos:
            console.print("the model names no EOS token: only max_new_tokens ends a row", style="yellow")
        requests = _requests(config, engine, prompts)
        _warm_up(engine, requests)
        names = {prompt.prompt_id: prompt.text for prompt in prompts}
        done = _decode(engine, requests, "decoding", console, config.progress, output, names)
        metrics = _describe(config, engine, prompts) | engine.report.metrics()
        output.write_metrics(metrics)  # now, so that an interrupted comparison does not lose them
        report = None
        if config.check is not None:
            report, greedy = _compare_with_greedy(config, engine, requests, done, console, registry)
            metrics |= _check_metrics(report, metrics, greedy)
            output.write_metrics(metrics)
    print_report(console, metrics)
    if report is not None:
        print_check(console, report)
    console.print(f"written to {output.path}/: generations.jsonl, metrics.json, config.yaml", highlight=False)
    return metrics


def _check_numbers(config: RunConfig) -> None:
    numbers = {name: getattr(config, name) for name in ("batch_size", "max_new_tokens", "num_threads")}
    if isinstance(config.data, SourceConfig):
        numbers["data.limit"] = config.data.limit
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")


def _engine(config: RunConfig, registry: Registry, baseline: Engine | None = None) -> Engine:
    """The engine of `config`, or plain greedy decoding with the target of `baseline`."""
    if baseline is not None:
        target, tokenizer, drafter = baseline.target, baseline.tokenizer, "none"
    else:
        model = config.model
        target, tokenizer = load_model(
            model.path, dtype=model.dtype, device=model.device, max_model_len=model.max_model_len
        )
        drafter = config.drafter
    return assemble(
        target, tokenizer, drafter=drafter, backend=config.backend, batch_size=config.batch_size, registry=registry
    )


def _compare_with_greedy(
    config: RunConfig,
    engine: Engine,
    requests: list[Request],
    done: dict[str, Generation],
    console: Console,
    registry: Registry,
) -> tuple[CheckReport, RunReport]:
    """Decode `requests` plainly with the same target and compare. Returns the verdict and the plain run's figures."""
    greedy = _engine(config, registry, baseline=engine)
    _warm_up(greedy, requests)
    expected = _decode(greedy, requests, "plain greedy", console, config.progress)
    judge = make_backend(engine.target.kv_cache_spec(1), config.backend, registry)
    names = [request.request_id for request in requests]
    report = compare([done[name] for name in names], [expected[name] for name in names], engine.target, judge)
    return report, greedy.report


def _requests(config: RunConfig, engine: Engine, prompts: list[Prompt]) -> list[Request]:
    """Encode, truncate and check all prompts before anything runs."""
    target = engine.target
    room = target.max_model_len - config.max_new_tokens
    names = [prompt.prompt_id for prompt in prompts]
    texts = [prompt.text for prompt in prompts]
    unlimited = encode_prompts(texts, engine.tokenizer, 2**62, target.vocab_size, names)
    ids = unlimited
    if isinstance(config.data, SourceConfig):  # a plugin's source may cut its prompts in its own way
        ids = [truncated(tokens, config.data, room, name) for tokens, name in zip(unlimited, names, strict=True)]
    encode_prompts(ids, None, target.max_model_len, target.vocab_size, names)
    eos = frozenset[int]() if config.ignore_eos else engine.eos_token_ids
    return [Request(name, tuple(tokens), config.max_new_tokens, eos) for name, tokens in zip(names, ids, strict=True)]


def _warm_up(engine: Engine, requests: list[Request]) -> None:
    """Run one batch for a few tokens, untimed."""
    few = [
        Request(request.request_id, request.prompt_ids, min(_WARM_UP_TOKENS, request.max_new_tokens))
        for request in requests[: engine.batch_size]
    ]
    for _ in engine.run(few):
        pass


def _decode(
    engine: Engine,
    requests: list[Request],
    title: str,
    console: Console,
    show: bool,
    output: OutputFolder | None = None,
    texts: dict[str, str] | None = None,
) -> dict[str, Generation]:
    """Decode all requests under a progress bar; rows are written as they finish."""
    done: dict[str, Generation] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[live]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not show) as progress:
        task = progress.add_task(title, total=len(requests), live="")
        for generation in engine.run(requests):
            done[generation.request_id] = generation
            if output is not None and texts is not None:
                output.write_generation(generation.request_id, texts[generation.request_id], generation)
            report = engine.report
            live = f"{report.tokens_per_second:.0f} tokens/s, τ {report.mean_acceptance_length:.2f}"
            progress.update(task, advance=1, live=live)
    return done


def _describe(config: RunConfig, engine: Engine, prompts: Iterable[Prompt]) -> dict[str, Any]:
    """What ran, on what."""
    import torch
    import transformers

    from emssd import __version__

    target = engine.target
    cuda = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    return {
        "title": f"{config.model.path} · drafter={_label(config.drafter)} · backend={_label(config.backend)} · "
        f"batch {config.batch_size} · {str(target.dtype).removeprefix('torch.')} on {cuda or target.device}",
        "num_prompts": len(list(prompts)),
        "versions": {
            "emssd": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {"device": cuda or platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
    }


def _label(options: Any) -> str:
    """A plugin's name, and its options where they are not the defaults: ``padded(pad_kv=False)``."""
    given = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name != "name" and field.default is not dataclasses.MISSING and value != field.default:
            given.append(f"{field.name}={value.value if isinstance(value, Enum) else value}")
    return f"{options.name}({', '.join(given)})" if given else str(options.name)


def _check_metrics(report: CheckReport, metrics: dict[str, Any], greedy: RunReport) -> dict[str, Any]:
    return {
        "greedy": greedy.metrics(),
        "check": {
            "exact": report.num_exact,
            "ties": len(report.ties),
            "differences": len(report.true_differences),
            "details": [
                {
                    "id": difference.request_id,
                    "position": difference.position,
                    "token": difference.token,
                    "greedy_token": difference.greedy_token,
                    "margin": difference.margin,
                    "tolerance": difference.tolerance,
                }
                for difference in report.differences
            ],
        },
        "speedup": metrics["decode_tokens_per_second"] / max(greedy.decode_tokens_per_second, 1e-9),
        "speedup_end_to_end": metrics["tokens_per_second"] / max(greedy.tokens_per_second, 1e-9),
    }
