"""The old place of `emssd_heads.training`."""

raise ImportError("emssd_train is emssd_heads.training now: the same names and commands are there")
