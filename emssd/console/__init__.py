"""Consoles of all commands, and their end."""
