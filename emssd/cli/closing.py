"""The end of a run beside its tables: its first texts, and remarks on figures that may mislead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from emssd.data.prompts import Prompt
from emssd.metrics.busy import busy_remark
from emssd.native import fallback_reason
from emssd.sequences import Generation

__all__ = ["print_texts", "print_whole", "remarks", "short_end", "short_start"]

_SHOWN_TEXTS = 2
_HARDLY = 0.1  # tokens that a policy lets a row draft in a step
_SHOWN_PROMPT, _SHOWN_TEXT = 120, 400  # characters


def print_texts(console: Console, rows: Iterable[tuple[Prompt, Generation]]) -> None:
    """The first texts, shortened, each after the end of its prompt; nothing of rows without text."""
    with_text = ((prompt, row.sample, row.text) for prompt, row in rows if row.text is not None)
    for prompt, number, text in islice(with_text, _SHOWN_TEXTS):
        sample = f", sample {number}" if number else ""
        console.print(Text(prompt.prompt_id + sample, style="bold"))
        for label, words in (("prompt", _asked(prompt)), ("text", short_start(text))):
            console.print(Padding(Text.assemble((f"{label}: ", "dim"), words), (0, 0, 0, 2), expand=False))


def print_whole(console: Console, rows: Iterable[Generation]) -> None:
    """The texts as they are, with an empty line between them; a terminal gets nothing that could command it."""
    text = "\n\n".join(row.text or "" for row in rows)
    if console.is_terminal:
        console.print(text, soft_wrap=True)
    else:
        print(text)


def _asked(prompt: Prompt) -> str:
    if prompt.token_ids is not None:
        return f"{len(prompt.token_ids)} token ids"
    return short_end(prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"]))


def short_end(text: str, length: int = _SHOWN_PROMPT) -> str:
    """The last characters of `text`, in one paragraph."""
    words = _one_paragraph(text)
    return words if len(words) <= length else f"… {words[-length:].lstrip()}"


def short_start(text: str, length: int = _SHOWN_TEXT) -> str:
    """The first characters of `text`, in one paragraph."""
    words = _one_paragraph(text)
    return words if len(words) <= length else f"{words[:length].rstrip()} …"


def _one_paragraph(text: str) -> str:
    """`text` without line breaks, and without what could command a terminal."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text).split())


def remarks(metrics: dict[str, Any], *, drafts: bool) -> list[str]:
    """Sentences on figures that say less than they seem to; `drafts` says whether the run had a drafter."""
    gain = _without_gain(metrics) if drafts else None
    said = [gain, fallback_reason(), busy_remark(metrics, metrics.get("greedy", {}))]
    return [sentence for sentence in said if sentence is not None]


def _without_gain(metrics: dict[str, Any]) -> str | None:
    found, tau, speedup = [], f"{metrics['mean_acceptance_length']:.2f}", metrics.get("speedup", 0.0)
    if tau == "1.00":
        found.append(f"acceptance length τ {tau}")
    if 0 < speedup <= 1:
        found.append(f"{speedup:.2f} times the speed of plain greedy decoding")
    if not found:
        return None
    why = ": try another drafter (emssd-plugins lists them), other options of this one, or a smaller batch_size"
    if metrics["num_allotted_tokens"] < _HARDLY * metrics["num_row_steps"]:
        why = (
            ", as the budget policy let next to nothing be drafted: by what it measured, drafts do not pay here; "
            "budget=fixed drafts all the same"
        )
    return f"nothing was gained ({', '.join(found)}){why}"
