"""The old place of `emssd.hooks`."""

raise ImportError("emssd.plugins is emssd.hooks now: the same names are there")
