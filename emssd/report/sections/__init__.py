"""The sections of a report, in its order."""

from __future__ import annotations

from emssd.report.sections.acceptance import acceptance
from emssd.report.sections.common import Plot, Section
from emssd.report.sections.comparisons import COMPARISONS, comparison, own
from emssd.report.sections.crossover import crossover
from emssd.report.sections.drafters import drafters
from emssd.report.sections.padding import appendix, padding_ratio
from emssd.report.sections.provenance import provenance
from emssd.report.sections.runs import plain_runs
from emssd.report.sections.step_time import step_time
from emssd.report.sections.time import time_of_steps
from emssd.report.sections.trees import trees
from emssd.report.sources import Material

__all__ = ["Plot", "Section", "sections"]

_OTHERS = ("padding_ratio", "acceptance", "step_time", "appendix", "crossover", "drafters", "trees")


def sections(material: Material) -> list[Section]:
    """All sections that `material` has rows for; the last one says where all of it comes from."""
    found = [
        *(comparison(material, about) for about in COMPARISONS),
        padding_ratio(material),
        acceptance(material),
        step_time(material),
        *appendix(material),
        crossover(material),
        drafters(material),
        trees(material),
        *own(material, [*(about.experiment for about in COMPARISONS), *_OTHERS]),
        time_of_steps(material),
        plain_runs(material),
        provenance(material),
    ]
    return [section for section in found if section is not None]
