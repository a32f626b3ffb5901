"""A token that the model computes as NaN or infinity spoils its own row from there on and nothing else, in any backend.

Oracle: in half precision the same run with an ordinary token in the place of the bad one, so that all shapes are the
same; in float64 `greedy_reference`. There the attack tests all backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from emssd_testing.drafters import ChainDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import AttentionBackend, LayerSpec, additive_mask, masked_attention
from emssd.attention.masked import StepWatch
from emssd.model import TargetModel
from emssd.sequences import Generation, Row
from tests.support.backends import MakeBackend, chosen, engine_of
from tests.support.tiers import looped

BACKENDS = chosen("ragged-page-1", "paged-grows", "paged-page-1", "paged-page-16")
each_backend = pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)

BAD, NEW_TOKENS = 60, 12
CLEAN = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3], [8, 3, 2]]
SICK = [[BAD, 2, 7], [1, 8, BAD, 2, 8, 1, 8, 2, 8], [4, 5, 9, 0, BAD]]
# Bad rows before, beside and after clean ones, which take over their places and pages.
PROMPTS = [SICK[0], CLEAN[0], SICK[1], CLEAN[1], CLEAN[2], SICK[2], CLEAN[3], CLEAN[0]]


class DraftsTheBadToken(ChainDrafter):
    """Drafts what comes next, with the bad token among it: at each place in turn, first of all at the first."""

    def chain(self, row: Row, limit: int) -> list[int]:
        if BAD in row.request.prompt_ids:
            return [BAD] * limit
        chain, index = self.upcoming(row), len(row.output_ids) % 5
        return [*chain[:index], BAD, *chain[index:]]


def decode(target: TargetModel, make: MakeBackend, prompts: Seq[list[int]], drafter: ChainDrafter) -> list[Generation]:
    return engine_of(target, drafter, make(), max_step_tokens=16).generate(prompts, NEW_TOKENS, ignore_eos=True)


def with_embedding(architecture: str, bad: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A model that computes one token as `bad`, and never generates it, as its own logit is 0."""
    model = tiny_model(architecture, dtype=dtype, max_model_len=64, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = bad
        model.lm_head.weight[BAD] = 0
    return model


@cache
def target_and_references() -> tuple[TargetModel, dict[tuple[int, ...], list[int]]]:
    model = with_embedding("llama", float("nan"))
    references = {tuple(prompt): greedy_reference(model, prompt, NEW_TOKENS) for prompt in PROMPTS}
    return TargetModel(model), references


def with_overflow(dtype: torch.dtype, factor: float) -> Any:
    """A model in whose first layer the bad token's value is larger than float16 can tell, and its key is not."""
    model = with_embedding("llama", 0.0, dtype)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 0
        embedding[BAD, 0] = 10
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = factor
    return model


HALF: dict[str, tuple[torch.dtype, Callable[[bool], Any]]] = {
    "bfloat16 NaN": (torch.bfloat16, lambda bad: with_embedding("llama", float("nan") if bad else 1.0, torch.bfloat16)),
    "bfloat16 1e38": (torch.bfloat16, lambda bad: with_embedding("llama", 1e38 if bad else 1.0, torch.bfloat16)),
    "float16 inf": (torch.float16, lambda bad: with_embedding("gemma2", 1e30 if bad else 1.0, torch.float16)),
    "float16 overflow": (torch.float16, lambda bad: with_overflow(torch.float16, 6e4 if bad else 0.0)),
}


@cache
def half_target(name: str, bad: bool) -> TargetModel:
    return TargetModel(HALF[name][1](bad))


@pytest.mark.parametrize("name", HALF)
@each_backend
def test_in_half_precision_a_row_has_the_tokens_beside_a_bad_one_that_it_has_beside_any(
    make: MakeBackend, name: str
) -> None:
    dtype, _ = HALF[name]
    if dtype is torch.float16 and make is BACKENDS["ragged-fused"]:
        pytest.skip("the fused kernel takes no float16")
    drafter = DraftsTheBadToken(61, 5, {tuple(prompt): prompt * 4 for prompt in CLEAN})
    usual, beside = (decode(half_target(name, bad), make, PROMPTS, drafter) for bad in (False, True))
    for right, got in zip(usual, beside, strict=True):
        if BAD not in right.prompt_ids:
            assert got.token_ids == right.token_ids, right.prompt_ids
            assert BAD not in right.token_ids


LAYER = LayerSpec(num_qo_heads=4, num_kv_heads=2, key_dim=8, value_dim=6, scale=0.4)


@looped("bad", [float("nan"), float("inf"), 1e30])
@looped("softcap", [None, 5.0])
@looped("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dense_attention_under_a_mask_gives_the_same_bits_whatever_is_masked(
    dtype: torch.dtype, softcap: float | None, bad: float
) -> None:
    """Keys and values that one query sees and another does not: only the first gets what is no number."""
    layer, generator = dataclasses.replace(LAYER, softcap=softcap), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, count, *shape, generator=generator).to(dtype) for count, *shape in
                         ((5, 4, 8), (40, 2, 8), (40, 2, 6)))  # fmt: skip
    seen = torch.arange(40) <= torch.arange(30, 35)[:, None] + torch.tensor([0, -5, 5])[:, None, None]
    mask = additive_mask(seen, dtype)
    clean = masked_attention(query, key, value, mask, layer)
    for part in (slice(0, 8), slice(0, 1)):
        for row, slot in ((0, 33), (1, 39), (2, 36)):
            keys, values = key.clone(), value.clone()
            keys[row, slot, :, part] = bad
            values[row, slot, :, part] = bad
            out = masked_attention(query, keys, values, mask, layer)
            unseen = ~seen[:, :, slot]
            unseen[[other for other in range(3) if other != row]] = True
            assert torch.equal(out[unseen], clean[unseen])
            if bad != 1e30:
                assert not bool(out[~unseen].isfinite().flatten(1).all(dim=1).any())


def test_where_looking_costs_a_wait_a_step_is_looked_at_as_a_whole_and_computed_again_if_need_be() -> None:
    watch, key = StepWatch(), torch.randn(1, 3, 2, 8)
    query, value, mask = torch.randn(1, 2, 4, 8), torch.randn(1, 3, 2, 6), torch.zeros(1, 2, 3)
    mask[0, 0, 2] = float("-inf")
    runs = []

    def compute() -> torch.Tensor:
        out = masked_attention(query, key, value, mask, LAYER, checked=not watch.trusts)
        watch.saw(out)
        runs.append(watch.trusts)
        return out

    clean = watch.run(compute)
    assert runs == [True]
    key[0, 2] = value[0, 2] = float("nan")
    out = watch.run(compute)
    assert runs == [True, True, False]
    assert torch.equal(out[0, 0], clean[0, 0])
    assert bool(out[0, 1].isnan().all())


@pytest.mark.parametrize("name", ["ragged-page-16", "padded", "unpad_inputs"])
def test_on_other_devices_than_cpus_the_steps_of_these_backends_are_watched(name: str) -> None:
    def make() -> AttentionBackend:
        backend = BACKENDS[name]()
        allocate = backend.allocate

        def watched(spec: Any) -> None:
            allocate(spec)
            getattr(backend, "_kernels", backend)._watched = True

        backend.allocate = watched  # type: ignore[method-assign]  # a CPU that makes the host wait
        return backend

    target, references = target_and_references()
    for generation in decode(target, make, PROMPTS, DraftsTheBadToken(61, 5, references)):
        assert list(generation.token_ids) == references[generation.prompt_ids], generation.prompt_ids
