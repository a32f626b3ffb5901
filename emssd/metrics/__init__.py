"""Measures a run: figures of its steps, the floor of a step, the machine, and what else ran on it."""

from emssd.metrics.least_squares import fit_non_negative

__all__ = ["fit_non_negative"]
