"""Prompts: where they come from, and how they become token ids."""
