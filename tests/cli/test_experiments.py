"""Every experiment runs at its toy size, its rows hold what a report needs, and its cells give the same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from emssd_lab.report.cells import frame, grids
from emssd_lab.report.rows import Row, read_rows
from omegaconf import OmegaConf

from emssd.cli.config import Size, conf_dir
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped, only

from .conftest import drafter, jsonl

TOYS = {  # how many jobs the sweep of each has
    "fig1": 3, "ablation": 5, "llma_models": 6, "draft_models": 3, "datasets": 6, "padding_ratio": 2, "acceptance": 2,
    "step_time": 2, "appendix": 1, "crossover": 6, "never_slower": 16,
    "drafters": 6, "trees": 6,
}  # fmt: skip
DECODING = sorted(TOYS.keys() - {"appendix"})


def rows_of(result: Any) -> list[dict[str, Any]]:
    assert result.status == 0, result.err
    return jsonl(result.folder / "rows.jsonl")


def toy(emssd: Callable, name: str, *more: str) -> Any:
    few = ("data.limit=4", "max_new_tokens=8") if name in ("crossover", "never_slower", "trees") else ()
    return emssd("-m", f"experiment={name}", "size=toy", "output_dir=out", "progress=false", *few, *more)


def test_the_list_above_is_complete() -> None:
    assert sorted(TOYS) == sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", only(DECODING, ci=("crossover", "fig1", "trees")))
@pytest.mark.costly("all jobs of an experiment")
def test_an_experiment_writes_a_row_per_job_and_its_cells_agree(name: str, emssd: Callable) -> None:
    rows = rows_of(result := toy(emssd, name))
    assert [row["job"] for row in rows] == list(range(TOYS[name]))
    texts: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        metrics, samples, origin = row["metrics"], row["samples"], row["provenance"]
        assert (row["experiment"], row["size"], row["repeat"]) == (name, "toy", 1)
        assert sum(samples["num_new_tokens"]) == metrics["num_new_tokens"]
        assert len(samples["acceptance_length"]) == metrics["num_prompts"]
        assert metrics["mean_acceptance_length"] == 1 or row["speculate"]
        assert all(row["costs"].values())
        assert origin["command"].startswith("python -m emssd")
        assert f"experiment={name}" in origin["command"]
        assert set(origin["versions"]) == {"emssd", "torch", "transformers", "python"}
        assert origin["hardware"]["bytes_per_second"] > 0 < origin["hardware"]["flops_per_second"]
        assert bool(row["replay"]) == (row["drafter"] == "replay" and row["speculate"])
        done = jsonl(result.folder / str(row["job"]) / "generations.jsonl")
        text = json.dumps(sorted((item["id"], item["token_ids"]) for item in done))
        same = row["model"], row["data_label"], row["batch_size"] if name == "step_time" else None
        texts.setdefault(same, set()).add(text)
    assert all(len(same) == 1 for same in texts.values())  # whatever was compared, the tokens are the same
    assert f"python -m emssd_lab.report {Path('out')}" in result.out
    assert "tokens/s" in result.err
    assert all(f" {number} of {TOYS[name]}: " in result.err for number in range(1, TOYS[name] + 1))
    assert result.err.count(" left\n") == TOYS[name]


def test_the_simulation_has_one_row_with_all_points(emssd: Callable) -> None:
    (row,) = rows_of(toy(emssd, "appendix"))
    assert [(point["p"], point["batch_size"]) for point in row["points"]] == [(0.5, 2), (0.8, 2), (0.5, 8), (0.8, 8)]
    for point in row["points"]:
        for name, estimate in point["simulated"].items():
            assert abs(estimate["mean"] - point["exact"][name]) < 5 * estimate["error"]


@pytest.mark.nightly
def test_the_cells_of_the_ablation_pad_what_they_say(emssd: Callable) -> None:
    rows = rows_of(toy(emssd, "ablation", "batch_size=4", "max_new_tokens=24"))
    counted = ("input_padding_tokens", "kv_padding_slots")
    padded = {row["method"]: tuple(row["metrics"][name] for name in counted) for row in rows}
    inputs, slots = padded["vanilla"]
    assert inputs > 0 < slots
    assert padded["unpad_both"] == padded["greedy"] == (0, 0)
    assert padded["unpad_kv"][1] == 0 < padded["unpad_kv"][0]
    assert padded["unpad_inputs"][0] == 0 < padded["unpad_inputs"][1]


@pytest.mark.nightly
def test_an_interrupted_experiment_goes_on_where_it_was(emssd: Callable) -> None:
    first = toy(emssd, "fig1")
    whole, path = rows_of(first), first.folder / "rows.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]}\n{lines[1][:40]}")  # killed while it wrote its second row
    assert toy(emssd, "fig1").sentence.startswith("output_dir=out holds the rows of an earlier experiment")
    again = rows_of(toy(emssd, "fig1", "resume=true"))
    assert [(row["job"], row["method"]) for row in again] == [(row["job"], row["method"]) for row in whole]
    assert again[0] == whole[0]
    other = toy(emssd, "fig1", "resume=true", "method=greedy,ragged,vanilla").sentence
    assert other.startswith("resume=true: job 1 of out/rows.jsonl was ")
    assert "go on with the same command" in other
    assert len(rows_of(toy(emssd, "fig1", "overwrite=true", "method=greedy"))) == 1


@looped("name", sorted(TOYS), at_a_time=2)
def test_whatever_a_size_chooses_is_there(name: str, emssd: Callable) -> None:
    sizes = OmegaConf.select(OmegaConf.load(conf_dir() / "experiment" / f"{name}.yaml"), "experiment.sizes") or {}
    plugins = {kind: Registry().names(kind) for kind in KINDS}
    for size in Size:
        if size.value in sizes and sizes[size.value] is None:
            continue
        result = emssd(f"experiment={name}", f"size={size.value}", "--cfg", "all", "-p", "hydra.sweeper", "--resolve")
        assert result.status == 0, result.err
        params = yaml.safe_load(result.out)["params"] or {}
        for group, choices in params.items():
            if group in (*KINDS, "model", "method", "task"):
                presets = [path.stem for path in (conf_dir() / group).glob("*.yaml")] + plugins.get(group, [])
                assert set(choices.split(",")) <= set(presets), (size, group)


@pytest.mark.parametrize(
    "swept",
    [
        ["data.path=a.txt,b.txt", "data=text"],
        ["budget=fixed,adaptive"],
        pytest.param(["model.path=a/final,b/final", "data=text", "data.path=a.txt", "model=hf"],
                     marks=pytest.mark.costly("loads two models")),
    ],
    ids=lambda swept: swept[0].partition("=")[0],
)  # fmt: skip
def test_runs_of_other_options_are_not_repeats_of_each_other(
    swept: list[str], emssd: Callable, model: str, work: Path
) -> None:
    for name in ("a", "b"):
        (work / f"{name}.txt").write_text("The for statement is\n")
        (work / name).mkdir()
        (work / name / "final").symlink_to(model)  # models of one name
    result = toy(emssd, "fig1", "method=ragged_greedy,ragged", "max_new_tokens=2", *swept)
    assert result.status == 0, result.err
    rows = frame(row for row in read_rows(result.folder / "rows.jsonl") if isinstance(row, Row))
    first, second = grids(rows)
    name, _, values = swept[0].lower().partition("=")
    ends = {grid.title.lower().rpartition(" · ")[2] for grid in (first, second)}
    assert {f"{name}={choice}" for choice in values.split(",")} & ends
    for grid in (first, second):
        assert grid.title in result.out
        assert [(line, len(repeats)) for line, repeats in grid.lines().items()] == [
            ("greedy on ragged", 1),
            ("ragged", 1),
        ]


MORTAL = drafter(
    "self.steps = getattr(self, 'steps', 0) + 1\n"
    "        if self.steps > 3:\n"
    "            raise RuntimeError('it died')\n"
    "        return Draft.empty(len(batch))",
    name="mortal",
)


def test_a_drafter_that_fails_leaves_no_row(emssd: Callable, install: Callable) -> None:
    install("mortal", MORTAL)
    short = ("data.limit=1", "max_new_tokens=12", "task=toy")
    result = toy(emssd, "drafters", "drafter=llma,mortal", *short)
    again = "once their causes are mended, the same command with resume=true makes them"
    assert result.sentence == f"1 of 2 runs failed; {again}"
    why = "failed: drafter 'mortal' (third-party-mortal 1.2) failed in propose: RuntimeError: it died"
    assert re.search(rf"^.* drafter=mortal .*{re.escape(why)}", result.out, re.MULTILINE)
    assert [row["drafter"] for row in jsonl(result.folder / "rows.jsonl")] == ["llma"]
    disabled = toy(emssd, "drafters", "drafter=llma,mortal", *short, "resume=true", "on_drafter_error=disable")
    assert disabled.sentence == (
        "on_drafter_error=disable would leave rows of a drafter that failed and drafted nothing; an experiment leaves "
        "such a run out, and resume=true makes it again. Leave on_drafter_error= out"
    )
    assert toy(emssd, "drafters", "drafter=llma", *short, "overwrite=true", "on_drafter_error=fail").status == 0


@pytest.mark.costly("a right run and a wrong one")
def test_what_a_check_found_is_said(emssd: Callable, draft_wrongly: Callable) -> None:
    checked = ("check=greedy", "method=greedy,unpad_both", "data.limit=2", "max_new_tokens=8")
    result = toy(emssd, "fig1", *checked, "method=greedy")
    assert "checked: 2 exact, 0 numerical ties, 0 true differences\n" in result.out
    draft_wrongly()
    result = toy(emssd, "fig1", *checked, "overwrite=true")
    _, row = jsonl(result.folder / "rows.jsonl")
    check = row["metrics"]["check"]
    assert check["differences"] > 0
    assert result.out.count("DIFFERENCE in ") == check["differences"]
    assert (
        f"checked: {check['exact'] + 2} exact, {check['ties']} numerical ties, {check['differences']} true "
        "differences, in jobs 1; out/JOB/metrics.json says where\n"
    ) in result.out


def test_kept_rows_of_another_format_are_refused_before_the_first_run(emssd: Callable) -> None:
    few = ("data.limit=1", "max_new_tokens=4")
    first = toy(emssd, "fig1", *few, "method=greedy")
    (row,) = rows_of(first)
    del row["metrics"]["decode_steps"]
    (first.folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    result = toy(emssd, "fig1", *few, "method=greedy,ragged", "resume=true")
    assert result.sentence.startswith(
        "resume=true: out/rows.jsonl:1 is of another format: it has no metrics.decode_steps"
    )
    assert "With overwrite=true all of its jobs run again" in result.sentence
    assert not [*(first.folder / "1").iterdir()]
