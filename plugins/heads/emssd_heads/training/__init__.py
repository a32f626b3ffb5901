"""Trains drafters for a target on the target's own texts: the command ``emssd-train``."""
