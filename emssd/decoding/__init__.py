"""The decode loop: schedule, draft, run, verify, advance."""
