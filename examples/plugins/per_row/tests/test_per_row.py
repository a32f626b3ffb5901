"""The backend keeps every rule of its interface, and serves whole engines."""

from __future__ import annotations

import pytest
from emssd import Engine
from emssd.attention import AttentionBackend
from emssd_testing import AttentionBackendConformance, tiny_model

from emssd_per_row import PerRowConfig
from emssd_per_row.backend import PerRowBackend


class TestPerRow(AttentionBackendConformance):
    config = PerRowConfig

    def make_backend(self) -> AttentionBackend:
        return PerRowBackend()


@pytest.mark.parametrize("architecture", ["gemma2", "mistral"])  # soft-cap; sliding window
def test_its_tokens_are_those_of_the_padded_backend(architecture: str) -> None:
    model, prompts = tiny_model(architecture), [[5, 6, 7, 5, 6], [9], [4, 4, 4, 4]]
    tokens = [
        [row.token_ids for row in Engine.from_model(model, backend=backend, batch_size=2).generate(prompts, 30)]
        for backend in (PerRowConfig(), "padded")
    ]
    assert tokens[0] == tokens[1]
