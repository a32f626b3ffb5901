"""The GPU benchmark on the CPU with tiny models: what it measures in which order, what it does when something fails."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from emssd.metrics.stats import PHASES


def options(**chosen: Any) -> argparse.Namespace:
    usual = {"device": "cpu", "only": ["step", "decode"], "quick": True, "batch": None, "new_tokens": 8}
    return argparse.Namespace(**(usual | {"repeats": 2, "acceptance_length": 4.0} | chosen))


def names(load: Any, **chosen: Any) -> list[str]:
    return [name for name, _ in load("gpu").pieces(None, "opt-6.7b", options(**chosen))]


def test_no_piece_has_the_name_of_another(load: Any) -> None:
    kinds = load("gpu").KINDS
    for quick in (True, False):
        results = names(load, quick=quick, only=kinds)
        assert len(results) == len(set(results))
        alone = [names(load, quick=quick, only=[kind]) for kind in kinds]
        assert all(alone)
        assert sorted(itertools.chain(*alone)) == sorted(results)


def test_any_failure_is_recorded_and_the_next_piece_begins(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, saved = load("gpu"), []
    fail = Mock(side_effect=ValueError("no such kernel\nand more"))
    monkeypatch.setattr(gpu, "pieces", lambda *_: iter([("a", fail), ("b", lambda: {"seconds": 1.0})]))
    results: dict[str, Any] = {"pieces": {}}
    gpu.measure_shape("tiny", options(), results, lambda: saved.append(list(results["pieces"])))
    assert results["pieces"]["a"]["failed"] == "ValueError: no such kernel"
    assert results["pieces"]["b"]["seconds"] == 1.0
    assert saved == [["a"], ["a", "b"]]


def test_a_device_that_failed_ends_the_program_after_saving(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, saved = load("gpu"), []
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=illegal))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the device is asked for no more"))
    measured = {"a": {"seconds": 1.0}, "b": {"seconds": 1.0}}
    monkeypatch.setattr(gpu, "pieces", lambda *_: iter((name, lambda: {"seconds": 1.0}) for name in measured))
    results: dict[str, Any] = {"pieces": {}}
    with pytest.raises(SystemExit) as ended:
        gpu.measure_shape("tiny", options(), results, lambda: saved.append(list(results["pieces"])))
    assert ended.value.code == load("gpu_parts").DEVICE_FAILED
    assert saved == [["a"]]
    assert "an illegal memory access was encountered" in results["pieces"]["a"]["failed"]


def test_results_survive_an_interruption_and_those_of_another_card_are_put_aside(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, out = load("gpu"), tmp_path / "gpu.json"
    out.write_text('{"machine": {"device": "A card"}, "pieces": {"a": {}, "c": {}}}')
    monkeypatch.setattr(
        gpu, "pieces", lambda *_: iter([("a", lambda: {"seconds": 1.0}), ("b", Mock(side_effect=KeyboardInterrupt))])
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--shape", "tiny", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    kept = {file.name: list(json.loads(file.read_text())["pieces"]) for file in tmp_path.iterdir()}
    assert kept == {"gpu.json": ["a"], "gpu.A-card.json": ["a", "c"]}


@pytest.mark.costly("the first to profile a step pays for what PyTorch loads then")
def test_the_host_and_products_are_measured(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, out = load("gpu"), tmp_path / "gpu.json"
    monkeypatch.setattr(load("gpu_products"), "TOKENS", (1, 2))
    command = f"gpu.py --device cpu --shape tiny --quick --only host products --batch 1 --repeats 2 --out {out}"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--new-tokens", "8"])
    gpu.main()
    results = json.loads(out.read_text())["pieces"]
    host = results.pop("host tiny flashinfer batch=1 context=24")
    assert host["phases"].keys() == {*PHASES}
    assert {"step", "_schedule", "plan", "_verify"} <= {name for *_, name in host["one_step"]}
    assert len(results) == 10
    assert all(row["by_tokens"].keys() == {"1", "2"} for row in results.values())


@pytest.mark.parametrize("shape", ["opt-6.7b", "llama-3-8b", "qwen3-8b"])
def test_products_are_those_of_the_model(load: Any, shape: str) -> None:
    config = load("gpu_measure").SHAPES[shape]
    with torch.device("meta"):
        values = transformers.AutoConfig.for_model(**config | {"num_hidden_layers": 1})
        model = transformers.AutoModelForCausalLM.from_config(values)
    layers = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    joined = {*load("gpu_products").products_of(config)} - layers
    assert len(joined) == 1 + (shape != "opt-6.7b"), "queries, keys, values; and gates with what they gate"


def test_the_timeline_counts_overlapping_kernels_once(load: Any) -> None:
    second = 1e6
    results = load("gpu_profile").timeline(
        [("b", 5 * second, 7 * second), ("a", 1 * second, 3 * second), ("a", 2 * second, 4 * second)], steps=2
    )
    assert (results["busy_seconds"], results["idle_seconds"], results["launches"]) == (2.5, 0.5, 1.5)
    assert results["kernels"] == [
        {"name": "a", "per_step": 1.0, "seconds": 2.0},
        {"name": "b", "per_step": 0.5, "seconds": 1.0},
    ]
    assert load("gpu_profile").timeline([], steps=1)["busy_seconds"] == 0


def test_ratios_are_to_runs_of_the_same_batch(load: Any) -> None:
    tables, where = load("gpu_tables"), "batch=8 context=512 new=64"
    run = {"equal_rows": 8, "acceptance_length": 4.0, "padding_per_new_token": 0.1}
    speeds = {"flashinfer greedy": 100, "flashinfer replay=4.0": 250, "hf dynamic": 50, "hf static": 80}
    speeds["loop tokens=1"] = 200
    pieces = {f"decode opt-6.7b {name} {where}": run | {"tokens_per_second": speed} for name, speed in speeds.items()}
    pieces[f"decode opt-6.7b hf static {where}"] |= {"compiled_while_timed": 1}
    pieces["decode opt-6.7b flashinfer greedy batch=2 context=512 new=64"] = {"failed": "no"}
    table = tables.table_of_decoding({"pieces": pieces})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    replayed = 1
    assert {header: cells[replayed] for header, cells in columns.items() if "×" in header} == {
        "× own greedy": "2.50", "× HF dynamic": "5.00", "× HF static": "3.12", "× loop": "1.25",
    }  # fmt: skip
    assert "compiled while timed" in columns["run"][3]
    assert columns["tokens/s"][5] == "no"
    assert "drafts for nothing" in table.caption
