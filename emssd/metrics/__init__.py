"""Figures of a run and of its steps."""
