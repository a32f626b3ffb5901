"""The end of a run on the console: figures, first texts, the result of a check, and remarks on misleading figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from emssd.cli.busy import busy_remark
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.decoding.check import CheckReport
from emssd.native import fallback_reason
from emssd.sequences import Generation

__all__ = [
    "harmless",
    "print_check",
    "print_failures",
    "print_report",
    "print_texts",
    "print_whole",
    "remarks",
    "speedup_text",
]

_SHOWN_DIFFERENCES = 10
_SHOWN_FAILURES = 3
_SHOWN_TEXTS = 2
_HARDLY = 0.1  # tokens that a policy lets a row draft in a step
_SHOWN_PROMPT, _SHOWN_TEXT = 120, 400  # characters


def print_report(console: Console, metrics: dict[str, Any], *, details: bool = False) -> None:
    """Print the figures that tell whether drafts pay, of ``metrics`` as in ``docs/metrics.md``; or all `details`."""
    console.print(metrics["title"], style="bold")
    if num_resumed := metrics["num_resumed_prompts"]:
        num_here = metrics["num_prompts"] - num_resumed
        console.print(f"of the {num_here} rows of this run; finished before: {num_resumed}")
    console.print(f"  {metrics['decode_tokens_per_second']:.1f} tokens/s, without the time for prompts")
    if "greedy" in metrics:
        console.print(f"  {speedup_text(metrics)} the speed without drafts")
    console.print(f"  τ {metrics['mean_acceptance_length']:.2f}: new tokens of a sequence in a step of the model")
    if details:  # all figures that are one number
        runs = [_numbers(run) for run in (metrics, metrics.get("greedy")) if run]
        table = Table("", "this run", *["without drafts"] * (len(runs) - 1), min_width=60)
        for name in runs[0]:
            table.add_row(name, *(f"{run[name]:,.5g}" if name in run else "" for run in runs))
        console.print(table)


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers = {prefix + name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    return numbers if prefix else numbers | _numbers(metrics["seconds"], "seconds.")


def speedup_text(metrics: Mapping[str, Any]) -> str:
    """The speed-up of a checked run with its interval, as in ``1.31× (1.22–1.40)``."""
    interval = metrics.get("speedup_interval")
    between = f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else "too short to tell"
    return f"{metrics['speedup']:.2f}× ({between})"


def print_check(console: Console, report: CheckReport, check: str | None = "plain") -> None:
    """The result of `check`."""
    if report.law is not None:
        style = "bold green" if report.law.is_right else "bold red"
        first, *others = report.law.described
        console.print(f"check={check}: {first}", style=style, soft_wrap=True)
        for line in others:
            console.print(line)
        if not report.num_exact and not report.differences:
            return
    wrong = len(report.true_differences)
    style = "bold red" if wrong else "bold green"
    console.print(
        f"check={check}: {report.num_exact} exact, {len(report.ties)} numerical ties, {wrong} true differences",
        style=style,
    )
    if report.ties:
        console.print("  a tie: rounding alone decides between two tokens; docs/exactness.md says when", soft_wrap=True)
    for difference in [*report.true_differences, *report.ties][:_SHOWN_DIFFERENCES]:
        sample = f", sample {difference.sample}," if difference.sample else ""
        console.print(
            f"  {'tie' if difference.is_tie else 'DIFFERENCE'} in {difference.request_id}{sample} at new token "
            f"{difference.position}: {difference.token} instead of {difference.greedy_token}, logits "
            f"{difference.margin:.3g} apart (tie up to {difference.tolerance:.3g})"
        )
    hidden = len(report.differences) - _SHOWN_DIFFERENCES
    if hidden > 0:
        console.print(f"  … and {hidden} more in metrics.json")


def print_failures(console: Console, failed: Sequence[FailedPrompt]) -> None:
    """Print the prompts that `on_error=skip` skipped."""
    if failed:
        console.print(f"{len(failed)} prompts were skipped, see errors.jsonl:", style="yellow")
    for prompt in failed[:_SHOWN_FAILURES]:
        console.print("  " + prompt.error)
    if len(failed) > _SHOWN_FAILURES:
        console.print(f"  … and {len(failed) - _SHOWN_FAILURES} more")


def print_texts(console: Console, rows: Iterable[tuple[Prompt, Generation]]) -> None:
    """The first texts, shortened, each after the end of its prompt; nothing of rows without text."""
    with_text = ((prompt, row.sample, row.text) for prompt, row in rows if row.text is not None)
    for prompt, number, text in islice(with_text, _SHOWN_TEXTS):
        sample = f", sample {number}" if number else ""
        console.print(Text(prompt.prompt_id + sample, style="bold"))
        for label, words in (("prompt", _end_of(prompt)), ("text", shortened(text, _SHOWN_TEXT))):
            console.print(Padding(Text.assemble((f"{label}: ", "dim"), words), (0, 0, 0, 2), expand=False))


def print_whole(console: Console, rows: Iterable[Generation]) -> None:
    """The texts as they are, with an empty line between them; a terminal gets nothing that could command it."""
    text = "\n\n".join(row.text or "" for row in rows)
    if console.is_terminal:
        console.print(harmless(text), soft_wrap=True)
    else:
        print(text)


def harmless(text: str) -> str:
    """`text` without what could command a terminal."""
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]+", "", text)


def _end_of(prompt: Prompt) -> str:
    if prompt.token_ids is not None:
        return f"{len(prompt.token_ids)} token ids"
    text = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
    return shortened(text, _SHOWN_PROMPT, keep_end=True)


def shortened(text: str, length: int, *, keep_end: bool = False) -> str:
    """The first or last characters of `text`, in one paragraph, without what could command a terminal."""
    words = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text).split())
    if len(words) <= length:
        return words
    return f"… {words[-length:].lstrip()}" if keep_end else f"{words[:length].rstrip()} …"


def remarks(metrics: dict[str, Any], *, drafts: bool) -> list[str]:
    """Sentences on figures that say less than they seem to; `drafts` says whether the run had a drafter."""
    gain = _without_gain(metrics) if drafts else None
    sentences = [gain, fallback_reason(), busy_remark(metrics, metrics.get("greedy", {}))]
    return [sentence for sentence in sentences if sentence is not None]


def _without_gain(metrics: dict[str, Any]) -> str | None:
    """A sentence on drafts that certainly do not pay: nothing was accepted, or the whole interval is below 1."""
    if f"{metrics['mean_acceptance_length']:.2f}" == "1.00":
        why = "no draft was accepted"
    elif (interval := metrics.get("speedup_interval")) and interval[1] < 1:
        why = "the drafts cost more time than they save"
    else:
        return None
    if metrics["num_allotted_tokens"] < _HARDLY * metrics["num_row_steps"]:
        return (
            "hardly anything was drafted: by what the budget policy measured, drafts do not pay here; budget=fixed "
            "drafts all the same"
        )
    return f"{why}: try another drafter (emssd-plugins lists them), other options of this one, or a smaller batch_size"
