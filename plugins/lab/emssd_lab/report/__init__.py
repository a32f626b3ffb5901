"""Reports of runs: the summary on the console, and ``python -m emssd_lab.report``, which makes pages of rows."""
