"""Sampling at a temperature above 0: how tokens are chosen, and how drafts are verified then."""
