"""A pass of a module compiled ahead of time, with the keys under which it lies on disk."""
