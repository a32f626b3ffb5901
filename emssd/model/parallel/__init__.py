"""Tensor parallel: process 0 decides what a step computes, and each process computes its shard of it."""
