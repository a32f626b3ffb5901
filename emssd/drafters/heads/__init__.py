"""Trained heads: their published files, and their decoder layers."""
