"""Helpers of several test files: the engine's state machine, its runs in little memory, strategies."""
