"""Measures a run: figures of its steps, and the floor of a step."""

from emssd.metrics.least_squares import fit_non_negative

__all__ = ["fit_non_negative"]
