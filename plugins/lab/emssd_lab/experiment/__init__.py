"""Experiments: sweeps whose runs are kept as rows, to be compared."""

from emssd_lab.experiment.callback import Experiment

__all__ = ["Experiment"]
