"""Reports of runs: what ends one on the console, and ``python -m emssd.report``, which makes pages of rows."""
