"""One training from its options to the files of the drafter: texts, training, and what the drafter is worth."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from emssd.cli.progress import Bar
from emssd.cli.provenance import hardware, versions
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError, OutputError
from emssd.model import ModelOptions, load_model
from emssd_heads.training import eagle3, medusa, pard
from emssd_heads.training.loop import check_can_train, train
from emssd_heads.training.options import TrainOptions
from emssd_heads.training.shared import Recipe
from emssd_heads.training.texts import Decoder, Text, generate_texts, kept_texts, read_prompts, writing

__all__ = ["RECORD", "run"]

OPTIONS, TEXTS, CHECKPOINTS, RECORD = "options.json", "texts.jsonl", "checkpoints", "training.json"

_RECIPES: dict[str, Callable[..., Recipe]] = {"eagle3": eagle3.recipe, "medusa": medusa.recipe, "pard": pard.recipe}
_MOST_DRAFTED = 32768  # tokens, by default: a projection to all of 262,144 has 168M weights at width 640
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def _only_errors(*libraries: str) -> Iterator[None]:
    """For a body in which these libraries log errors alone."""
    levels = {logger: logger.level for logger in map(logging.getLogger, libraries)}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@_only_errors("transformers", "accelerate")
def run(options: TrainOptions, console: Console) -> dict[str, Any] | None:
    """Train a drafter. With the option ``resume``, finished parts of the work are kept.

    Returns the acceptance on held-out prompts, ``None`` without any: ``drafted [depth]`` drafts that were so long at
    least, ``accepted [depth]`` drafts with so many accepted tokens, and ``tau``, the mean tokens of a row and step.
    """
    check_can_train()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no annotations
    began, folder = time.perf_counter(), Path(options.output).expanduser()
    _check_folder(folder, options)
    target, tokenizer = load_model(
        ModelOptions(options.model, dtype=options.model_dtype, device=options.device, compile=False)
    )
    dtype = _DTYPES.get(options.dtype or "", target.dtype)
    recipe = _RECIPES[options.kind](_of_few_tokens(options, target.vocab_size, console), target, tokenizer, dtype)
    prompts = read_prompts(options, recipe.max_len, tokenizer)
    if options.held_out >= len(prompts):
        raise ConfigError(
            f"--held-out is {options.held_out}, and there are {len(prompts)} prompts; leave some to train on"
        )
    kept, held_out = prompts[: len(prompts) - options.held_out], prompts[len(prompts) - options.held_out :]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPTIONS).write_text(json.dumps(options.decisive(), indent=2) + "\n", encoding="utf-8")
    decoder, finished = Decoder(options, target, tokenizer), kept_texts(folder / TEXTS, kept)
    with Bar(console, "texts", len(kept), done=len(finished), batch=options.batch_size) as bar:
        texts = generate_texts(folder / TEXTS, finished, kept, decoder, bar.tell)
    _train(folder, texts, recipe, options, console)
    acceptance = _acceptance(decoder, recipe.drafter, held_out, console) if held_out else None
    record = {
        **versions(),
        **hardware(target.device),
        "options": options.decisive(),
        "held_out": acceptance,
        "wall_seconds": round(time.perf_counter() - began),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return acceptance


def _of_few_tokens(options: TrainOptions, vocab_size: int, console: Console) -> TrainOptions:
    """The options of a drafter of the most frequent tokens, where it could have very many; says so on `console`."""
    if getattr(options, "draft_vocab_size", 0) is not None or vocab_size <= _MOST_DRAFTED:
        return options
    console.print(
        f"The drafter drafts the {_MOST_DRAFTED} most frequent of the target's {vocab_size} tokens; --draft-vocab-size "
        f"changes that.",
        soft_wrap=True,
    )
    return replace(options, draft_vocab_size=_MOST_DRAFTED)  # type: ignore[call-arg]  # as it has the field


def _train(folder: Path, texts: Seq[Text], recipe: Recipe, options: TrainOptions, console: Console) -> None:
    if not (usable := [text for text in texts if len(text.output) > 1]):  # drafts begin after the first new token
        raise ConfigError("the target ends all texts at once, so there is nothing to learn; give other prompts")
    loss, save = recipe.begin(texts)
    with Bar(console, "training", 1) as bar:

        def tell(done: int, total: int, latest: float | None) -> None:
            bar.tell(done, "" if latest is None else f"loss {latest:.3f}", total)

        train(loss, usable, options, folder / CHECKPOINTS, tell)
    save(folder)


def _check_folder(folder: Path, options: TrainOptions) -> None:
    """Refuse a folder that is not new, or one that was begun with other options."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not options.resume:
        raise OutputError(f"{folder} exists already; add --resume to go on with it, or give another --output")
    try:
        before = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"{folder} holds no training: {OPTIONS} in it cannot be read; give another --output"
        raise OutputError(why) from error
    options.check_same(before)


def _acceptance(decoder: Decoder, drafter: Any, prompts: Seq[tuple[int, ...]], console: Console) -> dict[str, Any]:
    """The acceptance of drafts for `prompts`, as `run` returns it."""
    with Bar(console, "held-out prompts", len(prompts), batch=decoder.options.batch_size) as bar:
        engine = decoder.engine(drafter, on_drafter_error=OnDrafterError.fail)
        for done, _ in enumerate(engine.run(decoder.requests(enumerate(prompts))), start=1):
            bar.tell(done)
    report = engine.report
    drafted = [count for _, count in sorted(report.drafted_by_depth.items())]
    accepted = [report.accepted_by_depth.get(depth, 0) for depth in range(1, len(drafted) + 1)]
    return {"drafted": drafted, "accepted": accepted, "tau": round(report.mean_acceptance_length, 4)}
