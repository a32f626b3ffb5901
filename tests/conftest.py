"""Tiny float64 targets with remembered references, and every backend, for the tests of all rooms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from emssd.attention import AttentionBackend
from tests.support.backends import chosen
from tests.support.oracle import Oracle, oracle_of

# "dense" is slow, and it asserts what the engine owes to a backend
BACKENDS = chosen("ragged-page-3", "paged-grows", "paged-page-1", "paged-page-4")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The target of tests for which one is enough."""
    return oracle_of("llama-11")


@pytest.fixture(scope="session", params=BACKENDS.values(), ids=BACKENDS)
def make_backend(request: pytest.FixtureRequest) -> Callable[[], AttentionBackend]:
    """Every backend in turn."""
    return request.param


@pytest.fixture(scope="session")
def make_ragged() -> Callable[[], AttentionBackend]:
    """The backend of tests for which one is enough."""
    return BACKENDS["ragged-page-16"]


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged prompts over the smallest vocabulary, one longer than what short rows attend with."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 5, (length,), generator=generator).tolist() for length in (5, 1, 20, 3, 9)]
