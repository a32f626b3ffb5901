"""Resuming a job: its unfinished prompts, and a check that the finished rows would be the same now."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

from emssd.cli.config import RunConfig
from emssd.cli.intake import num_samples, sampling_of, template_of
from emssd.cli.output import OutputFolder, as_asked
from emssd.cli.provenance import changed
from emssd.data.prompts import Prompt
from emssd.errors import ConfigError, PromptError
from emssd.model.load.checkpoint import files_of
from emssd.model.load.checkpoint_files import content_digest
from emssd.model.run.target import TargetModel
from emssd.sampling.grammar import Grammar

__all__ = ["check_compiled", "check_model", "made_with", "unfinished", "were_compiled"]


def unfinished(prompts: Iterable[Prompt], output: OutputFolder, config: RunConfig, config_text: str) -> list[Prompt]:
    """The prompts with rows that `output` does not hold yet. Raises ConfigError: rows that it holds were made with
    other options (than those of `config_text`) or files, or of other prompts, than now.
    """
    prompts = list(prompts)
    if not output.finished:
        return prompts
    again = "start again with overwrite=true or another output_dir"
    if changed := output.changed_options(config_text):
        raise ConfigError(
            f"resume=true: the rows in {output.path} were made with another value of {', '.join(changed)}; go on as "
            f"{output.path}/config.yaml says, or {again}"
        )
    check_model(config, output, warn=True)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    for (prompt_id, sample), made_of in output.finished.items():
        prompt, row = by_id.get(prompt_id), f"the row {prompt_id!r} in {output.path}"
        if prompt is None or as_asked(prompt) != made_of:
            raise ConfigError(
                f"resume=true: {row} has a prompt that the data no longer holds; bring the old data back, or {again}"
            )
        if output.made_with[prompt_id, sample].get("request") not in (None, _request_digest(config, prompt)):
            raise ConfigError(
                f"resume=true: {row} was made with another limit, other sampling or other stop strings of its own than "
                f"the data holds; bring the old data back, or {again}"
            )
        if sample >= (number := num_samples(config, prompt)):
            raise ConfigError(
                f"resume=true: {output.path} holds sample {sample} of {prompt_id!r}, and n is {number} now; raise n to "
                f"at least {sample + 1}, or {again}"
            )
    return [
        prompt
        for prompt in prompts
        if any((prompt.prompt_id, sample) not in output.finished for sample in range(num_samples(config, prompt)))
    ]


def check_model(config: RunConfig, output: OutputFolder, *, warn: bool = False) -> None:
    """Make sure that the rows which `output` keeps were made with the model as its files are now.

    Args:
        warn: say so if they seem the same but were written again, as a digest does not cover every weight.
    """
    now = _model_files(config)
    made = {name: {row[name] for row in output.made_with.values() if name in row} for name in now}
    if now and made["files"] - {now["files"]}:
        raise ConfigError(
            f"resume=true: the rows in {output.path} were made when the files of model.path={config.model.path} held "
            f"something else; bring the old ones back, or start again with overwrite=true or another output_dir"
        )
    if warn and now and made["written"] and now["written"] not in made["written"]:
        logging.getLogger("emssd").warning(
            "the files of model.path=%s were written again since rows in %s were made; their sizes, headers and "
            "samples are the same",
            config.model.path,
            output.path,
        )


def were_compiled(output: OutputFolder) -> bool | None:
    """Whether a compiled program made the rows that `output` keeps; ``None``: there are none, or they do not tell."""
    return next((made["compiled"] for made in output.made_with.values() if "compiled" in made), None)


def check_compiled(output: OutputFolder, target: TargetModel) -> None:
    """Make sure that the model as it is, which rounds otherwise, does not go on with rows of a compiled program."""
    if were_compiled(output) and target.compiled is None:
        raise ConfigError(
            f"resume=true: a compiled program made the rows in {output.path}, and this run has none "
            f"({target.why_compiled}); go on where the model can be compiled, or start again with overwrite=true or "
            f"another output_dir"
        )


def made_with(config: RunConfig, target: TargetModel | None = None) -> Callable[[Prompt], dict[str, Any]]:
    """A function from a prompt to all that its rows depend on, beside its text and the run's options.

    ``files`` and ``written`` are digests of the model's files, see `_model_files`. ``request`` is one of the limit, the
    sampling and the stop strings. ``compiled`` says whether a compiled program runs the `target`.
    """
    made: dict[str, Any] = _model_files(config)
    made |= {} if target is None else {"compiled": target.compiled is not None}
    return lambda prompt: made | {"request": _request_digest(config, prompt)}


def _model_files(config: RunConfig) -> dict[str, Any]:
    """Digests of the files' content, see `content_digest`, and times; none where they are not on this machine."""
    try:
        files = [] if config.model.architecture else files_of(config.model.path, config.model.gguf_file)
        digests = [(file.name, content_digest(file)) for file in files]
        times = [file.stat().st_mtime_ns for file in files]
    except OSError as error:
        raise ConfigError(f"{error.filename} of model.path={config.model.path}: {error.strerror}") from error
    return {"files": _short(digests), "written": _short(times)} if files else {}


def _request_digest(config: RunConfig, prompt: Prompt) -> str:
    try:
        sampling = sampling_of(config, prompt)
    except PromptError as error:  # it has no rows
        return str(error)
    options = None if sampling is None else changed(replace(sampling, n=1))  # n says how many rows there are
    limit = config.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens
    template = [] if config.chat_template is None else [template_of(config)]
    return _short([limit, options, config.stop if prompt.stop is None else [*prompt.stop], *template])


def _short(value: object) -> str:
    text = json.dumps(
        value, sort_keys=True, default=lambda part: asdict(part) if isinstance(part, Grammar) else dict(part)
    )
    return sha256(text.encode()).hexdigest()[:16]
