"""The training loop of Transformers: batches, optimiser, schedule, checkpoints, and how an interrupted one goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from emssd.errors import ConfigError, OutOfMemoryError
from emssd_heads.training.options import TrainOptions
from emssd_heads.training.texts import Text

__all__ = ["check_can_train", "train"]

Tell = Callable[[int, int, float | None], None]
"""Gets the number of steps that are done, the number of all steps, and the latest loss."""


def check_can_train() -> None:
    """Make sure, before any work, that the loop can run; it would use all GPUs that are visible."""
    if find_spec("accelerate") is None:
        raise ConfigError("training needs the package 'accelerate': pip install 'emssd[train]'")
    if torch.cuda.device_count() > 1:
        raise ConfigError(
            f"a drafter is trained on one GPU, and {torch.cuda.device_count()} are visible; choose one with "
            f"CUDA_VISIBLE_DEVICES=0"
        )


def train(loss: torch.nn.Module, texts: Seq[Text], options: TrainOptions, folder: Path, tell: Tell) -> None:
    """Train what `loss` has to train. An interrupted training goes on from its last checkpoint exactly.

    Ctrl-C waits for the end of the step, and writes one; a second Ctrl-C does not wait. The optimiser is AdamW, with
    the betas and the clipped gradients of EAGLE's authors. The learning rate rises for a 25th of the steps, and then
    falls as a cosine.

    Args:
        loss: see `emssd_heads.training.shared.DraftLoss`.
        folder: of checkpoints; the last one in it is begun with.
    """
    from transformers import Trainer, TrainingArguments

    on_cpu = next(loss.parameters()).device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,  # of batches
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.04,  # of all
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=0.5,
        bf16=options.bf16,
        seed=options.seed,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=[],
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
    )
    by_length = sorted(texts, key=lambda text: len(text.prompt) + len(text.output))  # so that little is padded
    batches: Any = [by_length[first : first + options.rows] for first in range(0, len(texts), options.rows)]
    steps, collate = _Steps(tell), partial(_arguments, learn_prompts=options.learn_prompts)
    trainer = Trainer(loss, arguments, data_collator=collate, train_dataset=batches, callbacks=[steps])
    trainer.remove_callback(PrinterCallback)
    before: Any = signal.getsignal(signal.SIGINT)
    if ours := callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, steps.interrupt)
    try:
        trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{arguments.device} has no room for a training step of {options.rows} texts; lower --rows, --depth or "
            f"--max-new-tokens"
        ) from error
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
    if steps.interrupted:
        raise KeyboardInterrupt


def _arguments(batches: Seq[Seq[Text]], *, learn_prompts: bool) -> dict[str, torch.Tensor]:
    """The arguments of a loss for the only one of `batches`."""
    (texts,) = batches
    rows = [torch.tensor(text.prompt + text.output) for text in texts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "num_prompt": torch.tensor([1 if learn_prompts else len(text.prompt) for text in texts]),
        "num_tokens": torch.tensor([len(row) for row in rows]),
    }


class _Steps(TrainerCallback):
    """Reports steps. Once it is `interrupted`, the step becomes the last, and is kept as a checkpoint."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self.interrupted = tell, False

    def interrupt(self, *_: object) -> None:
        """Handles Ctrl-C: the first is noted only."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history[-1:] if "loss" in entry]
        self._tell(state.global_step, state.max_steps, losses[0] if losses else None)
        if self.interrupted:
            control.should_save = control.should_training_stop = True


def _last_checkpoint(folder: Path) -> str | None:
    """The last one that is whole; ``trainer_state.json`` is written when all else is."""
    whole = {int(path.parent.name.rpartition("-")[2]): path.parent for path in folder.glob("*/trainer_state.json")}
    return str(whole[max(whole)]) if whole else None
