"""Measures a run: figures of its steps, and the floor of a step."""
