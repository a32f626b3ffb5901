"""The old place of `emssd_lab.simulate`."""

raise ImportError("emssd.simulate is emssd_lab.simulate now: the same names and commands are there")
