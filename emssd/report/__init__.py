"""Reports of runs: the summary on the console, and ``python -m emssd.report``, which makes pages of rows."""
