"""A pass of a module compiled ahead of time, on CPUs.

`compilable` decides whether there is a program; `tracing` makes one, `program` runs it, `fingerprint` is its key on
disk; `int8` rounds weights.
"""
