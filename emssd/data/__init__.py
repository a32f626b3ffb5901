"""Prompts: where they come from, and how they become token ids."""

from emssd.data.prompts import FailedPrompt, Prompt

__all__ = ["FailedPrompt", "Prompt"]
