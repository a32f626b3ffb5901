"""The engine of a run, as its options ask for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from emssd.cli.config import RunConfig
from emssd.cli.provenance import machine_rates
from emssd.decoding.engine import Engine
from emssd.model.loading import ModelCache
from emssd.plugins.registry import Registry

__all__ = ["make_engine"]


def make_engine(
    config: RunConfig,
    registry: Registry,
    models: ModelCache,
    *,
    baseline: Engine | None = None,
    num_steps: Callable[[int], int] | None = None,
) -> Engine:
    """The engine of `config`, or plain decoding with the target of `baseline`.

    Given `num_steps`, which says how many it has to do at most with sequences of some length, ``model.compile=auto``
    may compile the model.
    """
    if baseline is not None:
        target, tokenizer = baseline.target, baseline.tokenizer
    else:
        target, tokenizer = models.target(**vars(config.model))
        if num_steps is not None:
            target.compile_if_it_pays(num_steps(target.max_model_len))
        if config.experiment is not None:
            machine_rates(target.device, target.dtype)  # for its row; now, while no KV cache takes the memory it needs
    plain = baseline is not None or not config.speculate
    return Engine.assemble(
        target,
        tokenizer,
        drafter="none" if plain else config.drafter,
        backend=config.backend,
        budget=config.budget,
        options=replace(config, force_tokens=False) if plain else config,
        registry=registry,
        load=partial(models.draft, trust_remote_code=config.model.trust_remote_code, fallback=config.model.fallback),
    )
