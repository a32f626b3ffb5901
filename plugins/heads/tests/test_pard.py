"""A draft model that fills in masks drafts what one pass over a whole text and its masks gives, within its limits.

Oracle: its own eager pass, without a cache. float64. `test_always_right` tests that it is always right.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from emssd_heads.pard import PardConfig, emssd_drafters
from emssd_heads.pard.drafter import PardDrafter
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.models import tiny_model

from emssd.decoding.caches import make_backend
from emssd.drafting import DrafterContext, Outcome
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Batch, Request, Row
from tests.support.heads import refusal
from tests.support.tiers import looped

MODEL_LEN, LENGTH, VOCAB = 144, 4, 9
WIDE, MASK = VOCAB + 4, VOCAB + 2  # ids of the draft model


@cache
def random_model(vocab_size: int = WIDE) -> TargetModel:
    return TargetModel(tiny_model("qwen3", vocab_size=vocab_size, max_model_len=MODEL_LEN))


def make_drafter(
    model: TargetModel, backend: Any = "ragged", mask: int = MASK, length: int = LENGTH, **spec: Any
) -> PardDrafter:
    made = make_backend(replace(model.kv_cache_spec(4), **spec), backend, Registry())
    return PardDrafter(CausalLMRunner(model, made), VOCAB, mask, length)


def foreseen(model: TargetModel, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """The model's own tokens and their shares after a text and ``count - 1`` masks, without any cache."""
    logits = model.model(torch.tensor([tokens + [MASK] * (count - 1)]), use_cache=False).logits[0]
    shares, drafted = logits[len(tokens) - 1 :, :VOCAB].softmax(-1).max(-1)
    return drafted.tolist(), shares.tolist()


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["ragged", "padded"])
def test_after_any_acceptance_it_drafts_what_one_pass_over_everything_gives(backend: str) -> None:
    model, draw = random_model(), Random(5)
    drafter = make_drafter(model, backend)
    running: list[Row] = []
    for step in range(12):
        while len(running) < 3:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
            running.append(Row(Request(f"{step}-{len(running)}", tuple(prompt), 100)))
        batch, budget = Batch(tuple(running)), [draw.randint(0, LENGTH) for _ in running]
        draft = drafter.propose(batch, budget)
        for row, (start, count) in enumerate(zip(draft.indptr, budget, strict=False)):
            stop = start + draft.lengths[row]
            drafted, sure = foreseen(model, list(running[row].tokens), count) if count else ([], [])
            assert draft.token_ids[start:stop].tolist() == drafted
            assert list((draft.confidence or ())[start:stop]) == pytest.approx(sure, rel=1e-9)
        accepted = tuple(range(draw.randint(0, length)) for length in draft.lengths)
        for row, (start, taken) in enumerate(zip(draft.indptr, accepted, strict=False)):
            running[row].extend([*draft.token_ids[start : start + len(taken)].tolist(), draw.randrange(VOCAB)])
        drafter.observe(Outcome(batch, draft, accepted, ()))
        gone = [row for row in running if draw.random() < 0.2]
        drafter.release([row.request_id for row in gone])
        running = [row for row in running if row not in gone]
    drafter.release([row.request_id for row in running])
    assert drafter._runner.usage.held == 0


def test_it_does_not_draft_beyond_its_length_or_its_memory() -> None:
    backend = RaggedConfig(kernels=Kernels.torch)
    drafter = make_drafter(random_model(), backend, max_tokens=48)  # three pages
    rows = [
        Row(Request(name, (token,) * count, 9)) for name, token, count in (("a", 3, 14), ("b", 4, 20), ("c", 5, 15))
    ]
    with torch.inference_mode():
        assert drafter.propose(Batch(tuple(rows)), [4, 4, 2]).lengths == [4, 0, 2]
        long = Row(Request("long", (3,) * (MODEL_LEN - 2), 9))
        assert make_drafter(random_model()).propose(Batch((long,)), [4]).lengths == [2]
        assert make_drafter(random_model(VOCAB - 3), mask=0).propose(Batch((rows[0], long)), [4, 4]).lengths == [4, 2]
        unknown = Row(Request("unknown", (3, VOCAB - 3), 9))
        assert make_drafter(random_model(VOCAB - 3), mask=0).propose(Batch((unknown,)), [4]).lengths == [0]


def load(folder: Path, config: dict[str, Any] | None, **options: Any) -> Any:
    def load_runner(path: str, **_: Any) -> tuple[CausalLMRunner, Any]:
        model = random_model(VOCAB)
        return CausalLMRunner(model, make_backend(model.kv_cache_spec(4), "ragged", Registry())), None

    context = DrafterContext(VOCAB, None, load_runner, lambda name, values: pytest.fail("asks for no other"))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (spec,) = emssd_drafters()
    return spec.build(PardConfig(**({"path": str(folder)} | options)), context)


@looped(
    "config, options, mask",
    [
        ({"pard_token": 3}, {}, 3),
        ({"ptd_token_id": 4}, {}, 4),
        ({"pard_token": 3, "ptd_token_id": 4}, {}, 3),
        ({"pard_token": 3}, {"mask_token_id": 0}, 0),
        ({}, {"mask_token_id": VOCAB - 1}, VOCAB - 1),
    ],
)
def test_the_mask_is_that_of_the_config(config: Any, options: Any, mask: int, tmp_path: Path) -> None:
    assert load(tmp_path, config, **options)._mask == mask


@looped(
    "config, options, words",
    [
        (None, {"path": None}, "give drafter.path=FOLDER"),
        ({}, {}, "its config.json has no pard_token, so nothing says"),
        ({"pard_token": VOCAB}, {}, f"pard_token in its config.json is {VOCAB}, and its vocabulary has the ids 0 to"),
        ({"pard_token": [3, 4]}, {}, "pard_token in its config.json is [3, 4], and"),
        ({"pard_token": 3}, {"mask_token_id": -1}, "drafter.mask_token_id is -1, and"),
        ({"pard_token": 3, "spd_type": "pard2"}, {}, "it is a PARD-2 model"),
        ({"pard_token": 3, "pard2_scale": 0.02}, {}, "it is a PARD-2 model"),
    ],
)
def test_what_cannot_work_is_refused(config: Any, options: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(lambda: load(tmp_path, config, **options))
