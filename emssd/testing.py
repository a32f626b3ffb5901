"""The old place of `emssd_testing`."""

raise ImportError("emssd.testing is emssd_testing now: the same names and commands are there")
