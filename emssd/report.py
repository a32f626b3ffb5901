"""The old place of `emssd_lab.report`."""

raise ImportError("emssd.report is emssd_lab.report now: the same names and commands are there")
