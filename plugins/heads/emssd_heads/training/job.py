"""One training from its options to the files of the drafter: texts, training, and what the drafter is worth."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from emssd.cli.progress import Bar
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError, OutputError
from emssd.metrics.stats import RunReport
from emssd.model import ModelOptions, TargetModel, load_model
from emssd_heads.training import eagle3, medusa, pard
from emssd_heads.training.loop import check_can_train, train
from emssd_heads.training.options import TrainOptions
from emssd_heads.training.shared import Recipe
from emssd_heads.training.texts import Decoder, Text, generate_texts, kept_texts, read_prompts

__all__ = ["RECORD", "run"]

OPTIONS, TEXTS, CHECKPOINTS, RECORD = "options.json", "texts.jsonl", "checkpoints", "training.json"

_RECIPES: dict[str, Callable[..., Recipe]] = {
    "eagle3": eagle3.recipe,
    "medusa": medusa.recipe,
    "pard": pard.recipe,
}
_MOST_DRAFTED = (
    32768  # tokens, where nobody says how many: a projection to all of 262,144 has 168M weights at width 640
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The acceptance of the drafts of a run; they are chains.

    Attributes:
        drafted: ``[depth]`` drafts that were so long at least.
        accepted: ``[depth]`` drafts of which so many tokens were accepted at least.
        tau: mean acceptance length τ, tokens for each row and step, the target's own token included.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tau: float

    @classmethod
    def of(cls, report: RunReport) -> Acceptance:
        """The acceptance of the run of `report`."""
        drafted = tuple(count for _, count in sorted(report.drafted_by_depth.items()))
        accepted = tuple(report.accepted_by_depth.get(depth, 0) for depth in range(1, len(drafted) + 1))
        return cls(drafted, accepted, report.mean_acceptance_length)

    def table(self) -> Table:
        """For the console."""
        table = Table("depth", "drafted", "accepted", "share", title=f"held-out prompts: τ {self.tau:.2f}")
        for depth, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True), start=1):
            table.add_row(str(depth), str(drafted), str(accepted), f"{accepted / drafted:.1%}")
        return table


@contextmanager
def _only_errors(*libraries: str) -> Iterator[None]:
    """Within, these libraries log errors alone."""
    levels = {logger: logger.level for logger in map(logging.getLogger, libraries)}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@_only_errors("transformers", "accelerate")
def run(options: TrainOptions, console: Console) -> Acceptance | None:
    """Train a drafter. Whatever is done already is not done again, if options say resume.

    Returns what the drafter is worth on the held-out prompts; ``None`` without any.
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
    _begin(folder, options)
    decoder, there = Decoder(options, target, tokenizer), kept_texts(folder / TEXTS, kept)
    with Bar(console, "texts", len(kept), done=len(there), batch=options.batch_size) as bar:
        texts = generate_texts(folder / TEXTS, there, kept, decoder, bar.tell)
    _train(folder, texts, recipe, options, console)
    acceptance = None
    if held_out:
        with Bar(console, "held-out prompts", len(held_out), batch=options.batch_size) as bar:
            engine = decoder.engine(recipe.drafter, on_drafter_error=OnDrafterError.fail)
            for done, _ in enumerate(engine.run(decoder.requests(enumerate(held_out))), start=1):
                bar.tell(done)
        acceptance = Acceptance.of(engine.report)
    _record(folder, options, target, acceptance, time.perf_counter() - began)
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
    if not (usable := [text for text in texts if text.can_teach]):
        raise ConfigError("the target ends all texts at once, so there is nothing to learn; give other prompts")
    trainee = recipe.begin(texts)
    with Bar(console, "training", 1) as bar:

        def tell(done: int, total: int, loss: float | None) -> None:
            bar.tell(done, "" if loss is None else f"loss {loss:.3f}", total)

        train(trainee.loss, usable, options, folder / CHECKPOINTS, tell)
    trainee.save(folder)


def _check_folder(folder: Path, options: TrainOptions) -> None:
    """Refuse a folder that is not new, or one that was begun with other options."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not options.resume:
        raise OutputError(f"{folder} exists already; add --resume to go on with it, or give another --output")
    try:
        before = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{folder} holds no training: {OPTIONS} in it cannot be read; give another --output"
        ) from error
    options.check_same(before)


def _begin(folder: Path, options: TrainOptions) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPTIONS).write_text(json.dumps(options.decisive(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error


def _record(
    folder: Path, options: TrainOptions, target: TargetModel, acceptance: Acceptance | None, seconds: float
) -> None:
    record = {
        "emssd": version("emssd"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "options": options.decisive(),
        "held_out": acceptance
        and {"drafted": acceptance.drafted, "accepted": acceptance.accepted, "tau": round(acceptance.tau, 4)},
        "wall_seconds": round(seconds),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
