"""One run of the command line: load, decode with live figures, write, compare, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from emssd.cli.busy import OtherProcesses, cpu_times
from emssd.cli.config import STDOUT, RunConfig, prompt_source
from emssd.cli.console import print_check, print_failures, print_report, print_texts, print_whole, remarks
from emssd.cli.intake import Failures, check_options, make_engine, most_steps, num_samples, prompts_of, to_requests
from emssd.cli.output import OutputFolder
from emssd.cli.progress import Bar, loading_shown, show_messages
from emssd.cli.provenance import description, setting_of, versions
from emssd.cli.resume import check_compiled, check_model, made_with, unfinished, were_compiled
from emssd.cli.terminal import plain_console
from emssd.cli.text_stream import TerminalStream
from emssd.cli.turns import Turns, check_metrics, compared, ratio_interval
from emssd.data.prompts import Prompt
from emssd.decoding.caches import make_backend
from emssd.decoding.check import CheckReport
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, EmssdError, PromptError
from emssd.errors.faults import blame
from emssd.hooks import PromptSourceSpec
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner
from emssd.model.load.checkpoint import load_tokenizer
from emssd.model.load.loading import ModelCache
from emssd.model.run.parallel import Group
from emssd.sequences import Generation, Request

__all__ = ["run_job"]

_Done = dict[tuple[str, int], Generation]  # by the id of the prompt, and the sample


@dataclass(frozen=True)
class JobResult:
    """The result of a run; of a job that is resumed with nothing left to do, it has the metrics that are there."""

    metrics: dict[str, Any]
    generations: Seq[Generation] = ()
    engine: Engine | None = None


def run_job(
    config: RunConfig,
    output_dir: Path,
    config_text: str,
    registry: Registry,
    *,
    models: ModelCache,
    brief: bool = False,
    alone: bool = True,
    group: Group | None = None,
) -> JobResult:
    """Run `config`. After an error, rows that were finished by then are in the output folder.

    Args:
        brief: show progress only, and leave the tables to the caller.
        alone: no other runs are compared with it. With ``model.compile=auto``, compared runs compile nothing.
        group: the processes that run it together; rank 0 reads the prompts and writes the rows.
    """
    check_options(config)
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    registry.in_use.clear()  # what earlier runs of a sweep used
    own_threads = _own_threads()  # read before it is changed
    torch.set_num_threads(config.num_threads or own_threads)
    show_messages(plain_console(stderr=True), bars=config.progress)
    group = group or Group()
    with group.agreed():
        path = output_dir if group.rank == 0 else Path(STDOUT)  # which leads nowhere in other processes
        answers = [spec.answers_file for spec in registry.specs("data") if isinstance(spec, PromptSourceSpec)]
        output = OutputFolder(path, resume=config.resume, overwrite=config.overwrite, answers=answers)
    with output:
        run = _Run(config, config_text, registry, models, output, brief)
        read = group.made_by_first(run.read_prompts)
        run.prompts, run.left, run.failures.prompts, output.finished, output.made_with = read
        return run.decode(alone=alone) if run.left else run.end_without_rows()


@dataclass
class _Run:
    config: RunConfig
    config_text: str
    registry: Registry
    models: ModelCache
    output: OutputFolder
    brief: bool
    prompts: Seq[Prompt] = ()
    left: Seq[Prompt] = ()  # the prompts that have rows to decode
    is_streamed: bool = False

    def __post_init__(self) -> None:
        self.console, self.quiet = plain_console(stderr=True), plain_console(stderr=True, quiet=self.brief)
        self.source = prompt_source(self.config, self.registry)
        self.failures = Failures(self.config.on_error, answers=self.source.write_answers is not None)

    def read_prompts(self) -> tuple[Any, ...]:
        """Read and check all prompts before anything is loaded. Returns `prompts`, `left` and ``failures.prompts`` of
        this run, and `finished` and `made_with` of the output.
        """
        config, output = self.config, self.output
        self.prompts = self.failures.passed(prompts_of(config, self.registry))
        self.registry.find("backend", config.backend.name)
        self.left = unfinished(self.prompts, output, config, self.config_text)
        if config.resume:
            num_done, num_rows = len(output.finished), sum(num_samples(config, prompt) for prompt in self.prompts)
            there = f"{num_done} of {num_rows} rows" if num_done else "no rows, so this is a fresh start"
            self.quiet.print(f"resume=true: {output.path}/ holds {there}")
        if not self.left and output.finished and config.check is not None and "check" not in output.read_metrics():
            raise ConfigError(
                f"check={config.check.value} compares the rows that a run decodes, and {output.path} holds all; "
                f"leave check= out, or decode them again with overwrite=true"
            )
        return self.prompts, self.left, self.failures.prompts, output.finished, output.made_with

    def decode(self, *, alone: bool) -> JobResult:
        config, output = self.config, self.output
        engine = self._load(alone=alone)
        requests = to_requests(config, engine, self.left, self.failures, output.finished)
        if not requests:
            return self.end_without_rows()
        self.output.begin(self.config_text, self.failures.prompts, made_with(config, engine.target))
        engines = [engine]
        described = description(config, engine, self.registry)  # now: a check brings no plugins in use
        if config.check is not None:
            engines.append(make_engine(config, self.registry, self.models, baseline=engine))
        done, expected, figures = self._decode(engines, requests)
        if not done:
            return self.end_without_rows()
        requests = [request for request in requests if (request.prompt_id, request.sample) in done]
        output.write_errors(self.failures.prompts)
        metrics = described | self._counts(len(requests)) | figures
        output.write_metrics(metrics)  # now, so that an interrupted comparison does not lose them
        self._write_answers()
        report = None
        if config.check is not None:
            backend = make_backend(engine.target.kv_cache_spec(1), config.backend, self.registry)
            report = compared(engine, CausalLMRunner(engine.target, backend), requests, done, expected)
            metrics["check"] = check_metrics(report)
            output.write_metrics(metrics)
        result = JobResult(metrics, [done[request.prompt_id, request.sample] for request in requests], engine)
        self._print(result, report)
        return result

    def _load(self, *, alone: bool) -> Engine:
        config = self.config
        self.quiet.print(f"loading {config.model.path} …")
        steps = partial(most_steps, config, self.left) if alone else None
        if (before := were_compiled(self.output)) is not None:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, compile=before))
        with loading_shown(self.quiet, show=config.progress):
            engine = make_engine(config, self.registry, self.models, num_steps=steps)
        if before is False:
            engine.target.why_compiled = "not compiled, as the rows that are there were made"
        check_compiled(self.output, engine.target)
        check_model(config, self.output)  # again: to load it may have brought newer files from the hub
        if self.config.model.compile == "auto":
            self.quiet.print(engine.target.why_compiled, soft_wrap=True)
        if not engine.eos_token_ids and not config.ignore_eos and not config.stop:
            self.quiet.print("the model names no EOS token: only max_new_tokens ends a row", style="yellow")
        return engine

    def _counts(self, num_rows: int) -> dict[str, int]:
        num_before = len(self.output.finished)
        return {
            "num_prompts": num_before + num_rows,
            "num_resumed_prompts": num_before,
            "num_failed_prompts": len(self.failures.prompts),
        }

    def end_without_rows(self) -> JobResult:
        """Write why no prompt of this run gave a row. Raises PromptError: no earlier run left rows either."""
        failed = self.failures.prompts
        self.output.write_errors(failed)
        self._write_answers()
        print_failures(self.quiet, failed)
        if not self.output.finished:
            file = "what is above" if self.output.is_stdout else f"{self.output.path}/errors.jsonl"
            raise PromptError(f"none of the {len(failed)} prompts can be used; {file} says why")
        self.quiet.print(f"nothing {'else ' if failed else ''}is left to do")
        if not (metrics := self.output.read_metrics()):  # the disk was full when all rows were there, say
            metrics = {"setting": setting_of(self.config), "versions": versions()} | self._counts(0)
            self.output.write_metrics(metrics)
        return JobResult(metrics)

    def _write_answers(self) -> None:
        """Write the answers of a source that gives some, once all rows are there."""
        write, model, failed = self.source.write_answers, self.config.model, self.failures.prompts
        if write is None or self.output.is_stdout:
            return
        failed_ids = {item.prompt_id for item in failed}  # a sample of such a prompt may have a row
        answered = self.output.answered(prompt for prompt in self.prompts if prompt.prompt_id not in failed_ids)
        tokenizer = partial(
            load_tokenizer, model.path, trust_remote_code=model.trust_remote_code, gguf_file=model.gguf_file
        )

        def lines() -> Iterator[bytes]:
            try:
                yield from (f"{line}\n".encode() for line in write(answered, failed, model.path, tokenizer))
            except Exception as error:
                blame(self.registry.owner("data", self.source.name), "write_answers", error, EmssdError)

        self.output.write_answers(self.source.answers_file, lines())

    def _decode(self, engines: Seq[Engine], requests: Seq[Request]) -> tuple[_Done, _Done, dict[str, Any]]:
        """Decode with the first engine, by turns with the second one where there is one, under live figures.

        Rows of the first go to the output as they finish. Returns the rows of both, and the metrics.
        """
        engine, prompts = engines[0], {prompt.prompt_id: prompt for prompt in self.left}
        rows: dict[Engine, _Done] = {maker: {} for maker in engines}
        stream = self._text_stream(engine, requests)
        turns = Turns(engines, requests, stream)
        title, before = "decoding" if len(engines) == 1 else "decoding both ways", len(self.output.finished)
        live = Bar(self.console, title, before + len(requests) * len(engines), done=before, show=self.config.progress)
        with (
            live if stream is None else nullcontext(),
            OtherProcesses(partial(cpu_times, siblings=engine.target.group.size > 1)) as others,
        ):
            for finished_by, generation in turns.run():
                if finished_by is engine:
                    if stream is not None:
                        stream.end(generation.text or "")
                    if self.failures.add_row(generation):
                        continue
                    self.output.write_generation(prompts[generation.request_id], generation)
                rows[finished_by][generation.request_id, generation.sample] = generation
                speed, tau = engine.report.tokens_per_second, engine.report.mean_acceptance_length
                live.tell(before + sum(map(len, rows.values())), f"{speed:.0f} tokens/s, τ {tau:.2f}")
        metrics = engine.report.metrics() | {"other_cpu_share": others.share}
        if len(engines) == 1:
            return rows[engine], {}, metrics
        plain = engines[1].report.metrics() | {"other_cpu_share": others.share}
        metrics |= {"greedy": plain, "speedup_interval": ratio_interval(turns.parts)}
        for name, rate in (("speedup", "decode_tokens_per_second"), ("speedup_end_to_end", "tokens_per_second")):
            metrics[name] = metrics[rate] / max(plain[rate], 1e-9)
        return rows[engine], rows[engines[1]], metrics

    def _text_stream(self, engine: Engine, requests: Seq[Request]) -> TerminalStream | None:
        """For the text of one prompt on a terminal; some tokenizers change a text's spaces when more of it comes."""
        console, tokenizer = plain_console(), engine.tokenizer
        is_one = self.config.prompt is not None and len(requests) == 1 and not (self.output.is_stdout or self.brief)
        if not (is_one and console.is_terminal) or getattr(tokenizer, "clean_up_tokenization_spaces", False):
            return None
        self.is_streamed = True
        return TerminalStream(console, tokenizer, requests[0].stop)

    def _print(self, result: JobResult, report: CheckReport | None) -> None:
        """Print the results; if brief, only what is wrong. They go to stdout, unless the rows do."""
        config, output, failed = self.config, self.output, self.failures.prompts
        console, check = plain_console(stderr=output.is_stdout), config.check and config.check.value
        if self.brief:
            if report is not None and (report.differences or not (report.law is None or report.law.is_right)):
                print_check(console, report, check)
            return
        has_figures = config.details or (config.prompt is None if config.figures is None else config.figures)
        if config.prompt is not None and not (output.is_stdout or self.is_streamed):
            print_whole(console, result.generations)
        if has_figures:
            print_report(console, result.metrics, details=config.details)
            if result.engine is not None and (summary := result.engine.drafting.summary):
                console.print(summary, soft_wrap=True)
        if config.prompt is None:
            prompts = {prompt.prompt_id: prompt for prompt in self.left}
            print_texts(console, [(prompts[row.request_id], row) for row in result.generations])
        if report is not None:
            print_check(console, report, check)
        for remark in remarks(result.metrics, drafts=config.drafts) if has_figures else ():
            console.print(remark, style="yellow")
        print_failures(console, failed)
        files = ["generations.jsonl", "metrics.json", "config.yaml"]
        files += ["errors.jsonl"] if failed else []
        files += [self.source.answers_file] if self.source.answers_file else []
        if not output.is_stdout:
            (console if has_figures else self.console).print(f"written to {output.path}/: {', '.join(files)}")


@cache
def _own_threads() -> int:
    """PyTorch's own choice, for the jobs of a sweep that leave it; those before may have set another."""
    return torch.get_num_threads()
