"""Offers of plugins, and the search for them: the hooks, the records they return, and the registry."""

from emssd.hooks.hookspecs import BackendSpec, BudgetSpec, DrafterSpec, PromptSourceSpec, RuleSpec, hookimpl, offering

__all__ = ["BackendSpec", "BudgetSpec", "DrafterSpec", "PromptSourceSpec", "RuleSpec", "hookimpl", "offering"]
