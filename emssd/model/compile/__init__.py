"""A pass of a module compiled ahead of time, on CPUs.

`compilable` decides whether there is a program; `tracing` makes one, `program` runs it, `compiled` keeps it
on disk under the key of `fingerprint`; `packed` keeps weights in few bits.
"""
