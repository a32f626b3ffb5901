"""Writes docs/reference/models.md from docs/results/model_sweep.json.

python benchmarks/model_page.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "page"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "model_sweep.json"
PAGE = ROOT / "docs" / "reference" / "models.md"

_HEAD = """# Models

Every causal language model of Transformers {transformers}: {num_types} types, drawn tiny and with random weights in
float64, in {num_cases} variants. Ragged batches are decoded with chains and trees that are right, wrong and long at
random, past every window and threshold, and compared token for token with the model's own eager forward pass over each
row alone. One row has a prompt of 100 tokens, fed in pieces, in the {long} variants that take so many.

{served} types are served with exactly those tokens; {refused} are refused with a reason, and {not_built} could not be
drawn tiny. Tokens were wrong in {wrong} variants. A variant is named where it fares otherwise than its type.

Made by `python benchmarks/model_sweep.py`. A model of other code is [proved when it is
loaded](../decisions/0002-probe.md).
"""
_SECTIONS = {
    "wrong": "Wrong",
    "failed": "Failed",
    "served": "Served",
    "refused": "Refused",
    "not built": "Not drawn tiny",
}


def page(results: dict[str, Any]) -> str:
    """The Markdown of what `model_sweep` found."""
    cases = results["cases"]
    main = {case["model_type"]: case for case in reversed(cases)}  # the first variant of each type
    counts = Counter(case["outcome"] for case in main.values())
    text = _HEAD.format(
        transformers=results["transformers"],
        num_types=len(main),
        num_cases=sum(case["outcome"] != "not built" for case in cases),
        served=counts["served"],
        refused=counts["refused"],
        not_built=counts["not built"],
        long=sum(case.get("long_prompt", False) for case in cases),
        wrong=sum(case["outcome"] in ("wrong", "failed") for case in cases),
    )
    for outcome, title in _SECTIONS.items():
        groups: dict[str, list[str]] = {}
        for case in cases:
            first = main[case["model_type"]]
            alike = case is not first and (first["outcome"] == outcome or outcome == "not built")
            if case["outcome"] == outcome and not alike:
                label = f"`{case['model_type']}`" + ("" if case is first else f" ({case['variant']})")
                groups.setdefault(_general(case["reason"]), []).append(label)
        if not groups:
            continue
        text += f"\n## {title}\n\n"
        if outcome == "served":
            text += ", ".join(label for labels in groups.values() for label in labels) + "\n"
            continue
        text += "| reason | types |\n|---|---|\n"
        for reason, labels in sorted(groups.items(), key=lambda group: -len(group[1])):
            text += f"| {reason} | {', '.join(labels)} |\n"
    return text


def _general(reason: str) -> str:
    """A reason without the name and the numbers of one model, as a cell of a table."""
    reason = re.sub(r"^\S+ cannot be served: ", "", reason)
    reason = re.sub(r"^\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)\b", "it", reason)
    reason = re.sub(r"^\w+Attention\b", "it", reason)
    reason = re.sub(r" \(difference [^)]*\)", "", reason)
    reason = re.sub(r"; (emssd serves full and sliding attention, |decode it with its own generate).*", "", reason)
    return reason.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
