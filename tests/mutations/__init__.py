"""Planted faults: mistakes that the tests of CI must notice; see docs/decisions/0035-planted-faults.md."""
