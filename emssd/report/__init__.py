"""Reports of runs: tables on the console, and ``python -m emssd.report``, which makes pages of rows."""

from emssd.report.console import print_check, print_failures, print_report, summary

__all__ = ["print_check", "print_failures", "print_report", "summary"]
