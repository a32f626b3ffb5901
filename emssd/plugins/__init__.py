"""How plugins are offered and found: the hooks, the records they return, and the registry."""

from emssd.plugins.hookspecs import Spec, hookimpl

__all__ = ["Spec", "hookimpl"]
