"""The sections of a report, in its order."""

from __future__ import annotations

from emssd.report.sections.acceptance import ACCEPTANCE
from emssd.report.sections.common import Plot, Section
from emssd.report.sections.drafts import DRAFTERS, TREES
from emssd.report.sections.methods import COMPARISONS, CROSSOVER, own
from emssd.report.sections.origins import plain_runs, provenance
from emssd.report.sections.padding import PADDING_RATIO, appendix
from emssd.report.sections.steps import STEP_TIME, time_of_steps
from emssd.report.sources import Material
from emssd.report.tables import grouped

__all__ = ["Plot", "Section", "sections"]

_BEFORE = (*COMPARISONS, PADDING_RATIO, ACCEPTANCE, STEP_TIME)
_AFTER = (CROSSOVER, DRAFTERS, TREES)  # the simulation of the paper's appendix


def sections(material: Material) -> list[Section]:
    """All sections that `material` has rows for; the last one says where all of it comes from."""
    rows = grouped(material.rows, lambda row: row.experiment)
    known = {about.experiment for about in (*_BEFORE, *_AFTER)}
    others = [mine for name, mine in rows.items() if name not in known]
    found = [
        *(about.section(rows.get(about.experiment, [])) for about in _BEFORE),
        *appendix(material.simulations),
        *(about.section(rows.get(about.experiment, [])) for about in _AFTER),
        *(own(mine, number) for number, mine in enumerate(others)),
        time_of_steps(material.rows),
        plain_runs(material),
        provenance(material),
    ]
    return [section for section in found if section is not None]
