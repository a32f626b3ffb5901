"""The tools of `emssd_testing` do what they say: references, `DenseBackend`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import DenseBackend, greedy_reference
from emssd_testing.strategies import layer_specs
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec, additive_mask, masked_attention
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row


@pytest.mark.parametrize("architecture", ["opt", "llama", "mistral", "gemma2"])
def test_greedy_reference_is_what_transformers_generates(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model(architecture, vocab_size=11)
    if getattr(model.config, "attn_logit_softcapping", None):
        monkeypatch.setattr(model.config, "_attn_implementation", "eager")  # an older SDPA drops the cap
    for prompt in ([3], [3, 1, 2], [1, 2, 4] * 7):
        eos = greedy_reference(model, prompt, 4)[-1]
        for stop in ((), (eos,)):
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "eos_token_id": list(stop) or None, "pad_token_id": 0}
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **options)
            assert greedy_reference(model, prompt, 10, stop) == theirs[0, len(prompt) :].tolist()


@given(layer_specs(), st.integers(1, 7), st.integers(0, 2**16))
def test_dense_backend_agrees_with_masked_attention_on_one_prompt(layer: LayerSpec, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (length, layer.num_qo_heads, layer.key_dim),
        (length, layer.num_kv_heads, layer.key_dim),
        (length, layer.num_kv_heads, layer.value_dim),
    ]
    query, key, value = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if layer.sliding_window is not None:
        mask = mask.triu(1 - layer.sliding_window)
    backend = DenseBackend()
    backend.allocate(KVCacheSpec((layer,), torch.float64, torch.device("cpu"), 1, 64))
    plan = backend.plan(pack([Row(Request("a", (1,) * length, 1))], Draft.empty(1)))
    expected = masked_attention(query[None], key[None], value[None], additive_mask(mask[None], query.dtype), layer)[0]
    torch.testing.assert_close(backend.forward(plan, 0, query, key, value), expected, atol=1e-12, rtol=0)
