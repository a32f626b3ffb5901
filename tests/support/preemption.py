"""Runs in which rows are preempted for certain: random ones of an `EngineMachine`, and a fixed one in little memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from emssd_testing.models import tiny_model
from emssd_testing.oracle import References
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Drafter
from emssd.model import TargetModel
from tests.support.engine_machine import EngineMachine

__all__ = ["decode_in_little_memory", "run_with_preemption"]

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain a failure takes minutes


def run_with_preemption(machine: type[EngineMachine], *, share: int, num_steps: int) -> None:
    """Run `machine`; if no row was preempted in it, also with `EngineMachine.crowded`, in which some are.

    That is certain, and not luck of the draw: Hypothesis always runs the simplest example, where four prompts compete
    for the room of two. It matters most where `derandomize` is on, by default on CI: another run is the same run there.

    Args:
        machine: whose ``num_preempted`` and ``num_pieces`` are counted from 0.
        share: one in so many of the examples that Hypothesis would draw.
        num_steps: the most rules in a row.

    Raises:
        AssertionError: whatever the machine found; or no row was preempted, or no piece of a prompt computed.
    """
    examples = max(1, settings().max_examples // share)
    chosen = settings(max_examples=examples, stateful_step_count=num_steps, phases=_PHASES)
    crowded: type[EngineMachine] = type(machine.__name__, (machine,), {"crowded": True})
    for kind in (machine, crowded):
        kind.num_preempted = kind.num_pieces = 0
        run_state_machine_as_test(kind, settings=chosen)
        if kind.num_preempted and kind.num_pieces:
            return
    raise AssertionError(
        f"{crowded.num_preempted} rows of {machine.__name__} were preempted, even with a crowd at the beginning, and "
        f"{crowded.num_pieces} pieces of prompts computed, so it proves nothing about one of them"
    )


def decode_in_little_memory(drafter: Drafter, backend: Any, num_kv_tokens: int | None = 256) -> Engine:
    """Decode long rows with `drafter` in room for too few tokens; every token must be that of plain greedy decoding.

    Args:
        drafter: new.
        backend: a name or a config; what it rounds or pads must leave room for 150 tokens.
        num_kv_tokens: what there is room for; three rows grow up to 360. ``None`` for backends without a limit.

    Returns:
        The engine, idle, with its report.

    Raises:
        AssertionError: a token differs, no row was preempted, or, without a limit, one was.
    """
    references = _references()
    target = references.target
    limit = None if num_kv_tokens is None else str(num_kv_tokens * target.kv_cache_spec(1).bytes_per_token())
    options = EngineOptions(batch_size=3, max_step_tokens=16, kv_memory=limit, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, None, drafter=drafter, backend=backend, budget="fixed", options=options)
    prompts, new_tokens = [[1, 2, 3], [5, 6], [7, 8, 9], [1, 2, 3, 4, 1, 2]], [120, 115, 110, 30]
    done = engine.generate(prompts, new_tokens, ignore_eos=True)
    for prompt, most, generation in zip(prompts, new_tokens, done, strict=True):
        expected = references[tuple(prompt)][:most]
        assert generation.token_ids == expected, f"{prompt} got {generation.token_ids} in the place of {expected}"
    num_preempted = engine.report.num_preempted
    assert (num_preempted > 0) == (limit is not None), f"{num_preempted} rows were preempted in {limit} bytes of KV"
    return engine


@cache
def _references() -> References:
    return References(TargetModel(tiny_model("llama", vocab_size=11, max_model_len=144)), 120)
