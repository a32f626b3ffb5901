"""How plugins are offered and found: the hooks, the records they return, and the registry."""

from emssd.plugins.hookspecs import BackendSpec, BudgetSpec, DrafterSpec, PromptSourceSpec, hookimpl

__all__ = ["BackendSpec", "BudgetSpec", "DrafterSpec", "PromptSourceSpec", "hookimpl"]
