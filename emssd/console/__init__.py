"""Consoles of all commands, and their end."""

from emssd.console.terminal import steady

__all__ = ["steady"]
