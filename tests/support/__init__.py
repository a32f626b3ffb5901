"""Helpers of several test files: targets, drafters, backends, references, strategies."""
