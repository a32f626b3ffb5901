"""A job whose model is compiled: every run of it takes one program, whatever the seed of its process's hashes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model

from emssd.native import cache_dir

from .conftest import jsonl


@pytest.mark.nightly
def test_runs_of_all_hash_seeds_and_a_resumed_one_have_one_program(
    model: str, prompts: Path, work: Path, kernels: None
) -> None:
    folder = Path(shutil.copytree(model, work / "gemma"))
    gemma = tiny_model(
        "gemma3_text", dtype=torch.float32, vocab_size=260, max_model_len=96, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    gemma.save_pretrained(folder)
    for cache in ("cache", "other"):
        shutil.copytree(cache_dir() / "kernels", work / cache / "kernels")

    def run(seed: int, out: str, *arguments: str, cache: str = "cache") -> dict[str, Any]:
        command = [sys.executable, "-m", "emssd", f"model.path={folder}", "data=text", f"data.path={prompts}",
                   "max_new_tokens=24", "batch_size=3", "drafter=none", f"output_dir={out}", *arguments]  # fmt: skip
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "EMSSD_CACHE": str(work / cache)}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        metrics: dict[str, Any] = json.loads((work / out / "metrics.json").read_text())
        return metrics

    def tokens(out: str) -> dict[str, list[int]]:
        return {row["id"]: row["token_ids"] for row in jsonl(work / out / "generations.jsonl")}

    assert run(0, "plain", "data.limit=2", cache="other")["compiled"].startswith("not compiled: 24 steps at most")
    assert run(0, "first", "model.compile=true")["compiled"] == "compiled: just now, for later runs too"
    for seed in range(1, 4):
        assert run(seed, f"auto{seed}", f"data.limit={seed}")["compiled"] == "compiled: its program was kept"
        assert tokens(f"auto{seed}").items() <= tokens("first").items()
    run(0, "auto3", "resume=true")
    assert tokens("auto3") == tokens("first")
    assert len([path for path in (work / "cache" / "models").iterdir() if path.is_dir()]) == 1
    assert run(1, "plain", "resume=true")["compiled"] == "not compiled, as the rows that are there were made"
