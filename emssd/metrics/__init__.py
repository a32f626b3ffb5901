"""Measures a run: figures of its steps, the floor of a step, the machine, and what else ran on it."""
