"""A real, trained pair of models on real prompts: nothing lost against plain greedy decoding, and something gained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emssd_draft_model import DraftModelConfig

from emssd import Engine, Generation
from emssd.decoding.check import compare
from emssd.decoding.options import EngineOptions
from emssd.model import TargetModel, load_model

NEW_TOKENS = 40
TARGET, DRAFT = "gsm-llama-16m", "gsm-llama-1m"


@pytest.fixture(scope="module")
def target(shared: Path) -> tuple[TargetModel, object]:
    return load_model(str(shared / "models" / TARGET), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(shared: Path) -> list[str]:
    """Six questions to restate: the continuation copies from the prompt."""
    lines = (shared / "data" / "gsm8k_test_first600.jsonl").read_text().splitlines()[:6]
    return [f"<s>Question: {json.loads(line)['question']}\nRestated:" for line in lines]


def run(
    target: tuple[TargetModel, object], prompts: list[str], drafter: object, backend: str
) -> tuple[Engine, list[Generation]]:
    engine = Engine.assemble(
        *target, drafter=drafter, backend=backend, budget="fixed", options=EngineOptions(batch_size=len(prompts))
    )
    return engine, engine.generate(prompts, NEW_TOKENS)


@pytest.fixture(scope="module", params=["ragged", pytest.param("padded", marks=pytest.mark.nightly)])
def plain(
    request: pytest.FixtureRequest, target: tuple[TargetModel, object], prompts: list[str]
) -> tuple[str, list[Generation]]:
    """A backend, and what plain greedy decoding gives on it."""
    engine, greedy = run(target, prompts, "none", request.param)
    assert engine.report.mean_acceptance_length == 1.0
    return request.param, greedy


@pytest.mark.parametrize(("drafter", "least"), [("llma", 1.3), ("draft_model", 1.3)])
def test_no_token_differs_from_plain_greedy_but_for_ties_and_drafts_are_accepted(
    drafter: str,
    least: float,
    target: tuple[TargetModel, object],
    prompts: list[str],
    plain: tuple[str, list[Generation]],
    shared: Path,
) -> None:
    backend, greedy = plain
    chosen = DraftModelConfig(str(shared / "models" / DRAFT)) if drafter == "draft_model" else drafter
    engine, done = run(target, prompts, chosen, backend)
    report = compare(done, greedy, engine.runner)
    assert report.true_differences == []
    assert engine.report.mean_acceptance_length > least
    assert all(generation.text for generation in done)


def test_the_prompts_are_encoded_with_one_bos_token(target: tuple[TargetModel, object], prompts: list[str]) -> None:
    _, done = run(target, prompts[:1], "llma", "ragged")
    assert done[0].prompt_ids.count(1) == 1
    assert done[0].prompt_ids[0] == 1
