"""The old place of the simulator, which is gone."""

raise ImportError("emssd.simulate is gone: drafter=auto and budget=adaptive measure the run itself; see decision 63")
