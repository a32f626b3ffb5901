"""A run without a model: acceptance traces through the real scheduler and budget policies, with a step-time curve.

Example:
    >>> from emssd.drafting.budget import FixedBudget
    >>> from emssd.decoding.scheduler import ContinuousScheduler
    >>> from emssd.simulate import PRESETS, Simulator, geometric_trace
    >>> trace = geometric_trace(0.7, 64, num_speculative_tokens=4)
    >>> run = Simulator(trace, ContinuousScheduler(16), FixedBudget(), PRESETS["70b-8xh100"]).run()
    >>> run.report.num_new_tokens
    8192
"""

from emssd.simulate.appendix import Expected, acceptance_pmf, expected, max_pmf
from emssd.simulate.curves import PRESETS, FittedCurve, Roofline, StepCurve, load_curve, roofline
from emssd.simulate.simulator import Simulation, Simulator, summarize, summary_table, warm_up
from emssd.simulate.trace_drafter import TreeDrafter, TreeLaw
from emssd.simulate.traces import RequestTrace, StageTrace, Trace, geometric_trace, load_trace, save_trace

__all__ = [
    "PRESETS",
    "Expected",
    "FittedCurve",
    "RequestTrace",
    "Roofline",
    "Simulation",
    "Simulator",
    "StageTrace",
    "StepCurve",
    "Trace",
    "TreeDrafter",
    "TreeLaw",
    "acceptance_pmf",
    "expected",
    "geometric_trace",
    "load_curve",
    "load_trace",
    "max_pmf",
    "roofline",
    "save_trace",
    "summarize",
    "summary_table",
    "warm_up",
]
