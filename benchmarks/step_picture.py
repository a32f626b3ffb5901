"""Draws how steps are composed: what each row computed in the first steps of a real run of the embedded demo.

python benchmarks/step_picture.py --out docs/images/steps.png        # needs emssd[plots]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from emssd.attention import PackedInputs
from emssd.decoding.engine import Engine
from emssd.demo import prompts

COLOURS = {
    "prompt": "#9aa5b1",
    "newest token": "#1f4e79",
    "draft, accepted": "#4caf7d",
    "draft, rejected": "#e8a33d",
}


def record(num_prompts: int, batch_size: int, max_step_tokens: int, num_steps: int) -> list[dict[str, dict[str, int]]]:
    """By step and request: how many tokens of each kind were computed."""
    engine = Engine.from_pretrained(
        "demo", drafter="llma", budget="fixed", batch_size=batch_size, max_step_tokens=max_step_tokens, device="cpu"
    )
    steps: list[dict[str, dict[str, int]]] = []
    plan, observe = engine.runner.backend.plan, engine.drafting.observe

    def planned(packed: PackedInputs) -> object:
        steps.append({name: {"total": count} for name, count in zip(packed.request_ids, packed.lengths, strict=True)})
        return plan(packed)

    def observed(outcome: object) -> None:
        for row, length, kept in zip(outcome.batch, outcome.draft.lengths, outcome.accepted, strict=True):
            steps[-1][row.request_id] |= {"drafted": length, "accepted": len(kept)}
        observe(outcome)

    engine.runner.backend.plan, engine.drafting.observe = planned, observed
    texts = [prompt.text for prompt in prompts(32)]
    chosen = (texts[:num_prompts:2] + texts[8 : 8 + num_prompts : 2])[:num_prompts]
    limits = [12 + 9 * (i % 4) for i in range(num_prompts)]
    for _ in engine.stream(chosen, limits):
        if len(steps) >= num_steps:
            break
    return steps[:num_steps]


def draw(steps: list[dict[str, dict[str, int]]], out: Path) -> None:
    names = sorted({name for step in steps for name in step}, key=int)
    tops = {name: -i * 10.0 for i, name in enumerate(names)}
    figure, axes = plt.subplots(figsize=(11, 0.55 * len(names) + 1.6))
    for x, step in enumerate(steps):
        for name, cell in step.items():
            drafted, accepted = cell.get("drafted", 0), cell.get("accepted", 0)
            newest = 1 if "drafted" in cell else 0
            counts = {
                "prompt": cell["total"] - drafted - newest,
                "newest token": newest,
                "draft, accepted": accepted,
                "draft, rejected": drafted - accepted,
            }
            left = x + 0.06
            scale = 0.88 / max(8, cell["total"])
            for kind, count in counts.items():
                if count:
                    axes.barh(tops[name], count * scale, height=6.5, left=left, color=COLOURS[kind], edgecolor="white")
                    left += count * scale
            if counts["prompt"]:
                axes.text(x + 0.1, tops[name], f"{counts['prompt']}", va="center", fontsize=7, color="white")
    axes.set_yticks([tops[name] for name in names], [f"request {name}" for name in names], fontsize=8)
    axes.set_xticks([x + 0.5 for x in range(len(steps))], [str(x + 1) for x in range(len(steps))], fontsize=8)
    axes.set_xlabel("step; the tokens of one column are one ragged input of the model, without padding")
    axes.set_xlim(0, len(steps))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    for x in range(len(steps) + 1):
        axes.axvline(x, color="#e3e6ea", linewidth=0.7, zorder=0)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/steps.png"))
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-step-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=22)
    arguments = parser.parse_args()
    draw(record(arguments.prompts, arguments.batch_size, arguments.max_step_tokens, arguments.steps), arguments.out)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
