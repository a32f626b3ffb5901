"""A disk that gets full, for a part of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def room(size: int) -> Iterator[None]:
    """Within it, files grow to this size and no further: what still fits is written.

    A context and no fixture, as the limit holds for each file of the process. Pytest writes a test's result before its
    fixtures end, and its output may be a file.

    Args:
        size: of the largest file, bytes.
    """
    resource = pytest.importorskip("resource", reason="limits of processes are Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
