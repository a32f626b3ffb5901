"""Drafters of `draft_model` around a tiny model, on paged kernels."""

from __future__ import annotations

from typing import Any

from emssd_draft_model import DraftModelConfig
from emssd_draft_model.build import shape_of
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_residual.drafter import SampledDrafter, SampledShape

from emssd.attention import PackedInputs
from emssd.decoding.caches import make_backend
from emssd.draft_models import ModelDrafter
from emssd.draft_models.shapes import Shape
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from tests.support.backends import BACKENDS, runner_of

DRAFT_MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "static": {"expansion": [2, 3, 1]},
    "dynamic": {"num_nodes": 9, "depth": 4, "top_k": 3},
    "sequoia": {"num_nodes": 9, "depth": 4, "top_k": 3},
    "rsd_c": {"expansion": [3, 2, 1]},
    "rsd_s": {"width": 3, "depth": 3},
}


def draft_model_drafter(model: TargetModel, tree: str | Shape, vocab_size: int, **spec: Any) -> ModelDrafter:
    """A drafter whose draft model is `model`; its trees have the options of their kind, or a shape that is given."""
    runner = runner_of(model, BACKENDS["paged-page-4"](), 5, trees=True, **spec)
    if tree == "chain":
        return DraftModelDrafter(runner, vocab_size, DRAFT_MODEL_OPTIONS["chain"]["num_speculative_tokens"])
    if isinstance(tree, str):
        shape = shape_of(DraftModelConfig(tree=tree, **DRAFT_MODEL_OPTIONS[tree]))  # type: ignore[arg-type]
        assert shape is not None
    else:
        shape = tree
    if isinstance(shape, SampledShape):
        return SampledDrafter(runner, vocab_size, shape)
    return ModelDrafter(runner, vocab_size, shape)


def watch(drafter: ModelDrafter) -> list[PackedInputs]:
    """Everything that the draft model computes from now on."""
    backend: Any = drafter._runner.backend  # type: ignore[attr-defined]  # as of all runners with weights
    plan, seen = backend.plan, list[PackedInputs]()
    backend.plan = lambda packed: seen.append(packed) or plan(packed)
    return seen


def same_weights_drafter(target: TargetModel, backend: Any) -> DraftModelDrafter:
    """A draft model that is the target itself, with a KV cache of its own: it must be right everywhere."""
    cache = make_backend(target.kv_cache_spec(4), backend, Registry())
    return DraftModelDrafter(CausalLMRunner(target, cache), target.vocab_size, num_speculative_tokens=4)
