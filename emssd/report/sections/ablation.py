"""Table 2: which of the two unpaddings matters more. The paper's text and its own table disagree."""

from __future__ import annotations

from emssd.report import paper
from emssd.report.cells import Grid, Spread, grids, num_repeats
from emssd.report.figures import Curve, colour, curves
from emssd.report.lines import label_of
from emssd.report.sections.common import Plot, Section, begin, caveat, marked, speed_chart
from emssd.report.sections.shape import say_why
from emssd.report.sections.speedups import advantage, speed_table
from emssd.report.sources import Material
from emssd.report.text import escape, listed

__all__ = ["ablation", "paper_larger"]

_MODEL = "opt-6.7b"
_CELLS = ("vanilla", "unpad_kv", "unpad_inputs", "unpad_both")


def ablation(material: Material) -> Section | None:
    """Table 2 and the verdict."""
    rows = material.of("ablation")
    if not rows:
        return None
    theirs = paper_larger()
    inputs = listed(size for size, larger in theirs.items() if larger == "inputs")
    claim = (
        "The paper says that both unpaddings matter, unpadding the KV cache more (text and caption of Table 2). The "
        f"figures of that table say the inputs do, at batch size {inputs}. Below is what this project measures."
    )
    title = "Table 2: unpadding the KV cache, the inputs, or both"
    found = grids(rows)
    section = begin("ablation", title, claim, (row.provenance for row in rows), num_repeats(found))
    for index, grid in enumerate(found):
        section.head(escape(grid.title))
        section.say(caveat(grid))
        speed_table(section, grid, "llma", _MODEL)
        section.points(advantage(grid))
        plot = Plot(f"ablation_{index}", f"Speed-up by batch size: {grid.title}", speed_chart(grid, grid.title))
        beside = Plot(f"ablation_{index}_paper", "Speed-up by batch size in the paper's Table 2", _paper_chart())
        section.plots(
            [plot, beside],
            f"Medians, bars from the least to the greatest repeat; beside, the paper's.{marked(grid.mark)}",
        )
        _verdict(section, grid, theirs)
        _why(section, grid)
        say_why(section, grid, "llma", _MODEL)
    return section


def paper_larger() -> dict[int, str]:
    """Which unpadding alone gains more by the paper's own table, by batch size."""
    columns = {method: paper.speedups("llma", _MODEL, method) for method in _CELLS}
    return {
        size: "inputs" if columns["unpad_inputs"][size] > columns["unpad_kv"][size] else "KV cache"
        for size in columns["vanilla"]
    }


def _paper_chart() -> str:
    lines = []
    for method in _CELLS:
        points = {float(size): ratio for size, ratio in paper.speedups("llma", _MODEL, method).items()}
        lines.append(Curve(f"paper: {label_of(method)}", points, colour(method), "paper"))
    title = f"The paper's Table 2, {paper.label(_MODEL)}"
    return curves(title, "batch size / rows", "speed-up (plain greedy decoding = 1)", lines, level=1.0)


def _verdict(section: Section, grid: Grid, theirs: dict[int, str]) -> None:
    """Gains of each unpadding alone and on top of the other, and which is larger."""
    lines, said = [], []
    for size in grid.batch_sizes:
        ratio = grid.ratio("unpad_inputs", "unpad_kv", size)
        gains = [
            grid.ratio("unpad_kv", "vanilla", size),
            grid.ratio("unpad_inputs", "vanilla", size),
            grid.ratio("unpad_both", "unpad_inputs", size),
            grid.ratio("unpad_both", "unpad_kv", size),
        ]
        if ratio is None or any(gain is None for gain in gains):
            continue
        larger, sure = _larger(ratio)
        lines.append([str(size), *(gain.text() for gain in gains if gain), ratio.text(), larger, theirs.get(size, "")])
        said.append((size, larger, sure))
    if not lines:
        section.say("Without rows of all four cells at a batch size there is no verdict.")
        return
    columns = ["batch", "KV alone", "inputs alone", "KV on top of inputs", "inputs on top of KV", "inputs ÷ KV"]
    section.say(
        "Gains, as ratios of tokens/s within a repeat: each unpadding alone over vanilla, and each on top of the "
        "other. Both ways of asking have one answer, unpad inputs ÷ unpad KV: above 1, the inputs matter more."
    )
    section.table([*columns, "larger here", "in the paper"], lines)
    section.points(_sentences(said, theirs))


def _larger(ratio: Spread) -> tuple[str, bool]:
    """Which matters more, and whether all repeats agree."""
    sure = ratio.count > 1 and not ratio.covers(1)
    name = "inputs" if ratio.median > 1 else "KV cache"
    return (name if sure else f"{name} (one repeat)" if ratio.count == 1 else f"{name} (within spread)"), sure


def _sentences(said: list[tuple[int, str, bool]], theirs: dict[int, str]) -> list[str]:
    found = []
    for name in ("inputs", "KV cache"):
        if sizes := [size for size, larger, sure in said if sure and larger == name]:
            found.append(
                f"Verdict: at batch size {listed(sizes)} unpadding the {name} matters more, beyond the spread."
            )
    if unclear := [size for size, _, sure in said if not sure]:
        found.append(f"At batch size {listed(unclear)} the repeats do not settle it, or there is only one.")
    against_text = [size for size, larger, sure in said if sure and larger == "inputs"]
    against_table = [size for size, larger, sure in said if sure and size in theirs and larger != theirs[size]]
    if against_text:
        found.append(f"So at batch size {listed(against_text)} the paper's text is not borne out.")
    if against_table:
        found.append(f"So at batch size {listed(against_table)} the paper's table is not borne out.")
    return found


def _why(section: Section, grid: Grid) -> None:
    """What each cell pads, and what one piece of padding costs by the floor."""
    lines = []
    for size in grid.batch_sizes:
        for method in _CELLS:
            if cell := grid.get(method, size):
                inputs, slots = (
                    cell.spread(lambda row, name=name: row.metrics[name] / max(row.metrics["num_new_tokens"], 1)).median  # type: ignore[misc]
                    for name in ("input_padding_tokens", "kv_padding_slots")
                )
                lines.append([str(size), cell.line.label, f"{inputs:.2f}", f"{slots:.2f}"])
    if not lines:
        return
    section.say("Why: what is padded, per new token, all steps counted.")
    section.table(["batch", "method", "input padding tokens", "KV padding slots"], lines, left=2)
    row = grid.rows[0]
    hardware, costs = row.provenance["hardware"], row.costs
    token = 2 * costs["matmul_parameters"] / hardware["flops_per_second"]
    slot = costs["kv_bytes_per_token"] / hardware["bytes_per_second"]
    section.say(
        f"By this machine's rates a padded input costs {1e6 * token:,.3g} µs of arithmetic, once, where arithmetic "
        f"bounds the step; a lost KV slot {1e6 * slot:,.3g} µs of reading in every later step of its batch, so that it "
        f"costs as much after {token / slot:,.0f} steps."
    )
