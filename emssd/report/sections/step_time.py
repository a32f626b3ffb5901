"""The inference time figure: the time of a step by tokens per sample and batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from emssd.report import paper
from emssd.report.cells import Spread
from emssd.report.figures import Curve, colour, curves
from emssd.report.floor import Floor
from emssd.report.rows import Row, tokens_per_sample
from emssd.report.sections.common import Plot, Section, begin, marked
from emssd.report.sources import Material
from emssd.report.steps import Steps, milliseconds, steps_of
from emssd.report.text import escape, listed

__all__ = ["step_time"]

_Rows = Mapping[int, Mapping[int, list[Row]]]  # by batch size and tokens per sample
_QUOTED = 5  # tokens per sample that the paper compares with one


def step_time(material: Material) -> Section | None:
    """Median times of steps, which have as many tokens as is said where drafts are wrong throughout."""
    found = steps_of(material.of("step_time"))
    if not found:
        return None
    ratio = paper.STEP_MS[_QUOTED] / paper.STEP_MS[1]
    claim = (
        "The paper shows that with 4 rows a step of OPT-6.7b takes essentially as long for several tokens per row as "
        f"for one, and that with 16 rows it does not: {paper.STEP_MS[1]} ms for one token, {paper.STEP_MS[_QUOTED]} "
        f"ms for {_QUOTED}, {ratio:.2f} times as long (512 existing tokens)."
    )
    repeats = max(len(rows) for steps in found for sizes in steps.cells.values() for rows in sizes.values())
    origins = (row.provenance for steps in found for row in steps.rows)
    title = "Time of a step by tokens per sample"
    section = begin("step_time", title, claim, origins, repeats)
    if all(steps.longest_acceptance == 1 and "replay" in steps.mark for steps in found):
        section.say(
            "Drafts are **replay**: made to be wrong throughout, so that every step has as many tokens as is said."
        )
    for index, steps in enumerate(found):
        _of_setting(section, index, steps)
    return section


def _of_setting(section: Section, index: int, steps: Steps) -> None:
    lengths = sorted({int(length) for row in steps.rows for length in row.samples["num_prompt_tokens"]})
    span = f"{lengths[0]}–{lengths[-1]}" if len(lengths) > 1 else listed(lengths)
    behind = f"{span} tokens of prompt, {steps.rows[0].max_new_tokens} new"
    section.head(escape(steps.title))
    longest = steps.longest_acceptance
    partly = (
        f"Drafts are accepted in part, with a mean acceptance length of up to {longest:.2f}." if longest > 1 else ""
    )
    made_up = "**Random weights**: a made-up model of that shape." if steps.random_weights else ""
    section.say(made_up, f"{behind}.", partly)
    cells = steps.cells
    counts = sorted({tokens for sizes in cells.values() for tokens in sizes})
    section.say("Median ms of a step by tokens per sample (least and greatest repeat), and below it the floor:")
    lines = []
    for size, by_tokens in cells.items():
        lines.append([f"batch {size}", *(_ms(by_tokens.get(count)) for count in counts)])
        lines.append(["floor", *(_floor_ms(by_tokens.get(count)) for count in counts)])
    section.table(["", *map(str, counts)], lines)
    section.points(_sentences(cells))
    ylabel = "ms per step"
    svg = curves(steps.title, "tokens per sample in a step", ylabel, _curves(cells), mark=steps.mark, log=False)
    section.plots(
        [Plot(f"step_time_{index}", f"Milliseconds of a step by tokens per sample: {steps.title}", svg)],
        "Medians of steps and of repeats, bars from the least to the greatest repeat; dotted, the floor."
        + marked(steps.mark),
    )


def _sentences(cells: _Rows) -> list[str]:
    """How much longer a step of several tokens is, and what bounds it."""
    found = []
    for size, by_tokens in cells.items():
        if 1 not in by_tokens or len(by_tokens) < 2:
            continue
        several = min((count for count in by_tokens if count > 1), key=lambda count: (abs(count - _QUOTED), count))
        ratio = Spread.within_repeats(by_tokens[several], by_tokens[1], _step_seconds)
        bounds = {count: floor.bound for count, rows in by_tokens.items() if (floor := _floor(rows[0]))}
        first = next((count for count in sorted(bounds) if bounds[count] == "FLOPs"), None)
        bound = "bytes bound it throughout" if first is None else f"arithmetic bounds it from {first} tokens per row on"
        theirs = paper.STEP_MS[_QUOTED] / paper.STEP_MS[1]
        beside = f" (the paper: {theirs:.2f})" if size == 16 and several == _QUOTED else ""
        same = "" if ratio is None or not ratio.covers(1) or ratio.count == 1 else ", no difference beyond the spread"
        said = "in no repeat in common" if ratio is None else f"{ratio.text()} times as long as one of 1{beside}{same}"
        found.append(f"Batch size {size}: a step of {several} tokens per row is {said}; by the floor {bound}.")
    return found


def _step_seconds(row: Row) -> float:
    return float(row.metrics["median_decode_step_seconds"])


def _curves(cells: _Rows) -> list[Curve]:
    lines = []
    for index, (size, by_tokens) in enumerate(cells.items()):
        spreads = {float(count): milliseconds(rows) for count, rows in by_tokens.items()}
        points = {count: spread.median for count, spread in spreads.items()}
        ranges = {count: (spread.low, spread.high) for count, spread in spreads.items()}
        lines.append(Curve(f"batch {size}", points, colour(None, index), ranges=ranges))
        floors = {float(count): 1e3 * floor.seconds for count, rows in by_tokens.items() if (floor := _floor(rows[0]))}
        lines.append(Curve("", floors, colour(None, index), "floor"))
    return lines


def _floor(row: Row) -> Floor | None:
    """Of a step in which no draft is cut, as the median one."""
    computed = tokens_per_sample(row) * row.metrics["decode_row_steps"]
    return Floor.of(dataclasses.replace(row, metrics={**row.metrics, "decode_computed_tokens": computed}))


def _ms(rows: list[Row] | None) -> str:
    return "" if rows is None else milliseconds(rows).text()


def _floor_ms(rows: list[Row] | None) -> str:
    floor = _floor(rows[0]) if rows else None
    return "" if floor is None else f"{1e3 * floor.seconds:.2f} ({floor.bound})"
