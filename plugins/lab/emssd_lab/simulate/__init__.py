"""A run without a model: acceptance traces through the real scheduler and budget policies, with a step-time curve.

Example:
    >>> from emssd.drafting.budget import FixedBudget
    >>> from emssd.decoding.scheduler import ContinuousScheduler
    >>> from emssd_lab.simulate import PRESETS, Simulator, geometric_trace
    >>> trace = geometric_trace(0.7, 64, num_speculative_tokens=4)
    >>> run = Simulator(trace, ContinuousScheduler(16), FixedBudget(), PRESETS["70b-8xh100"]).run()
    >>> run.report.num_new_tokens
    8192
"""

from emssd_lab.simulate.curves import PRESETS
from emssd_lab.simulate.simulator import Simulator
from emssd_lab.simulate.trace_drafter import TreeLaw
from emssd_lab.simulate.traces import RequestTrace, StageTrace, Trace, geometric_trace, load_trace

__all__ = [
    "PRESETS", "RequestTrace", "Simulator", "StageTrace", "Trace", "TreeLaw", "geometric_trace", "load_trace",
]  # fmt: skip
