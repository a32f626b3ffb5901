"""The sections of a report, in its order."""

from __future__ import annotations

from emssd.report.sections import (
    ablation,
    acceptance,
    crossover,
    datasets,
    drafters,
    padding,
    peers,
    runs,
    speedups,
    step_time,
    time,
)
from emssd.report.sections import provenance as origins
from emssd.report.sections.common import Plot, Section
from emssd.report.sources import Material

__all__ = ["Plot", "Section", "sections"]


def sections(material: Material) -> list[Section]:
    """All sections that `material` has rows for; the last one says where all of it comes from."""
    found = [
        speedups.fig1(material),
        ablation.ablation(material),
        speedups.llma_models(material),
        speedups.draft_models(material),
        datasets.datasets(material),
        padding.padding_ratio(material),
        acceptance.acceptance(material),
        step_time.step_time(material),
        *padding.appendix(material),
        crossover.crossover(material),
        drafters.drafters(material),
        *speedups.own(material),
        time.phases(material),
        time.floors(material),
        peers.peers(material),
        runs.plain_runs(material),
        origins.provenance(material),
    ]
    return [section for section in found if section is not None]
