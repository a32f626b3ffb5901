"""The comparison with other engines: messages of runners and program, its counts, and a whole run on little."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from emssd.data.demo import model_path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

FAKE = """
import argparse, os, sys
sys.path.insert(0, {folder!r})
from protocol import Engine, Request, serve

def load(arguments: argparse.Namespace):
    print("noise of a library")
    os.write(1, b"noise of a library in C\\n")
    calls = []

    def build(request: Request) -> Engine:
        print("noise while it builds")
        def generate(prompts, new):
            calls.append(len(prompts))
            os.system("echo noise of a child")
            {trouble}
            return [[7, 8, *row, 2, 9, 9][:new] for row in prompts]
        return Engine(generate, lambda: {{"calls": calls}})

    return build

serve(load, ["torch"])
"""


@pytest.fixture
def peers(load: Any) -> Any:
    """The package beside the benchmark, as the benchmark imports it."""
    for name in ("comparison", "figures", "protocol", "workers"):
        load(f"peers.{name}")
    return load("peers")


def add_fake(peers: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, trouble: str = "pass") -> None:
    """Add a peer whose runner answers ``7 8 PROMPT 2 9 9`` after `trouble`."""
    script = folder / f"{name}.py"
    script.write_text(FAKE.format(folder=str(BENCHMARKS / "peers"), trouble=trouble))
    monkeypatch.setitem(peers.workers.PEERS, name, peers.workers.Peer(str(script)))


def setting(peers: Any) -> Any:
    return peers.workers.Setting("no model", "no draft", "float32", threads=1)


def test_noise_on_stdout_does_not_reach_the_answers(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_fake(peers, monkeypatch, tmp_path, "fake")
    worker = peers.workers.Worker("fake", setting(peers), tmp_path / "log")
    request = peers.protocol.Request("greedy", 2, 5, [[4], [5, 6], [2]], [2], warm_up=2)
    try:
        answers = [worker.ask(request), worker.ask(request)]
    finally:
        worker.close()
    assert "torch" in worker.versions
    for answer in answers:
        assert answer["tokens"] == [[7, 8, 4, 2], [7, 8, 5, 6, 2], [7, 8, 2]], "rows end with their first EOS"
        assert 0 < answer["seconds"] < 60
    assert answers[1]["details"]["calls"] == [2, 3, 2, 3], "a warm-up of two prompts, then all three, in both requests"
    assert (tmp_path / "log").read_text().count("noise") == 3 + 4


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("raise ValueError('no such mode')", "ValueError: no such mode"),
        ("print('out of luck', file=sys.stderr); sys.stderr.flush(); os._exit(3)", "status 3.*out of luck"),
        ("return []", "0 rows came back for 1 prompts"),
    ],
)
def test_a_runner_that_fails_says_why(
    trouble: str, message: str, peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_fake(peers, monkeypatch, tmp_path, "fake", trouble)
    worker = peers.workers.Worker("fake", setting(peers), tmp_path / "log")
    try:
        with pytest.raises(peers.workers.PeerError, match=f"(?s){message}"):
            worker.ask(peers.protocol.Request("greedy", 1, 4, [[4]], [2]))
    finally:
        worker.close()


def test_a_cell_that_fails_leaves_the_others(peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_fake(peers, monkeypatch, tmp_path, "sound")
    add_fake(peers, monkeypatch, tmp_path, "late", "assert len(calls) < 3, 'worn out'")
    add_fake(peers, monkeypatch, tmp_path, "early", "raise ValueError('never')")
    request = peers.protocol.Request("greedy", 1, 4, [[4]], [2])
    with Progress(disable=True) as progress:
        compared = peers.comparison.Comparison(request, setting(peers), tmp_path, progress)
        compared.run([(name, "greedy", 1) for name in ("sound", "late", "early")], repeats=3)
    assert [len(answers) for answers in compared.answers.values()] == [3]
    assert {name: why.split(" (see")[0] for (name, _, _), why in compared.failed.items()} == {
        "late": "AssertionError: worn out",
        "early": "ValueError: never",
    }


def test_counts_of_equal_rows_and_ratios(peers: Any) -> None:
    def answers(seconds: list[float], tokens: list[list[int]]) -> list[dict[str, Any]]:
        return [{"seconds": duration, "tokens": tokens, "details": {}} for duration in seconds]

    measured = {
        ("vllm", "greedy", 1): answers([1.0], [[5, 2], [4, 2]]),
        ("emssd", "ngram", 4): answers([1.0, 0.5, 0.25], [[1, 2], [3, 2]]),
        ("vllm", "greedy", 4): answers([1.0, 1.0, 1.0], [[1, 2], [4, 2]]),
        ("vllm", "ngram", 4): answers([2.0, 1.0, 2.0], [[1, 2], [3, 3, 3, 2]]),
    }
    measured["vllm", "ngram", 4][0]["tokens"] = [[1, 2], [3, 3, 3, 3]]
    references = {"HF float32": [[1, 2], [3, 3, 3, 2]]}
    rows = peers.figures.figures(measured, references, {("hf", "greedy", 4): "it is | gone\nfor good"})
    first, emssd, greedy, ngram, failed = rows
    assert emssd["tokens_per_second"] == [4, 8, 16]
    assert emssd["median"] == 8
    assert [row["equal_rows"]["HF float32"] for row in (emssd, greedy, ngram)] == [1, 1, 2]
    assert [row["equal_to_own_greedy"] for row in (first, emssd, greedy, ngram)] == [None, None, 1, 0]
    assert [row["equal_in_all_repeats"] for row in (emssd, greedy, ngram)] == [2, 2, 1]
    assert failed["failed"] == "it is | gone\nfor good"
    table = peers.figures.speed_table(rows).splitlines()
    assert table[0].endswith("| = HF float32 | = own greedy |")
    assert table[5] == "| 4 | ngram | vllm | 3 | 3 – 6 | 2.67 | 2/2 | 0/2 |"
    assert "| failed: it is \\| gone |" in table[6]
    assert {line.replace("\\|", "").count("|") for line in table} == {9}


def arguments(tmp_path: Path, *words: str) -> list[str]:
    """A comparison on little, of the peers and models that are given."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"How many of {i} are {i}?"}) + "\n" for i in range(4)))
    fixed = ["--data", str(data), "--num-prompts", "4", "--max-new-tokens", "12", "--repeats", "2", "--threads", "1"]
    fixed += ["--dtype", "float32", "--out", str(tmp_path / "results" / "peers.json")]
    return [*fixed, *words]


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "cpu_peers.py"), *arguments(tmp_path, *words)]
    return subprocess.run(command, check=False, timeout=600, capture_output=True, text=True)


PAIR = ("--model", str(model_path("target")), "--draft-model", str(model_path("draft")))


@pytest.mark.benchmark
def test_a_comparison_on_little_is_exact_and_names_what_is_missing(tmp_path: Path) -> None:
    missing = ("--python", f"vllm={tmp_path}/python", f"openvino={sys.executable}")
    batches = ("--batch-sizes", "3", "--modes", "greedy", "ngram")
    chosen = ("--emssd", "ngram.match_length=1", "ngram.copy_length=3", "budget=fixed", "max_step_tokens=64")
    done = run(tmp_path, *PAIR, *missing, *batches, *chosen, "--peers", "emssd", "hf", "vllm", "openvino")
    assert done.returncode == 0, done.stderr
    for name in ("vllm", "openvino"):
        assert f"{name} is not installed" in done.stdout
        assert f'nox -s "peers({name})"' in done.stdout
    results = json.loads((tmp_path / "results" / "peers.json").read_text())
    cells = {(row["peer"], row["mode"], row["batch_size"]): row for row in results["cells"]}
    assert list(cells) == [("emssd", "greedy", 3), ("hf", "greedy", 3), ("emssd", "ngram", 3)]
    for cell, row in cells.items():
        assert len(row["seconds"]) == len(row["details"]) == 2
        assert row["equal_rows"] == {"HF float32": 4}, f"{cell} has other tokens than Hugging Face"
        assert row["equal_to_own_greedy"] == (None if cell[1] == "greedy" else 4)
        assert row["equal_in_all_repeats"] == 4
    drafted = cells["emssd", "ngram", 3]["details"][0]["metrics"]
    assert 0 < drafted["mean_draft_length"] <= 3, "the option ngram.copy_length did not arrive"
    assert cells["emssd", "greedy", 3]["details"][0]["metrics"]["mean_acceptance_length"] == 1
    assert results["run"]["versions"].keys() == {"emssd", "hf"}
    assert results["run"]["options"]["dtype"] == "float32"
    assert str(tmp_path) not in json.dumps(results), "a path of this machine is in the results"
    assert "| 3 | ngram | emssd |" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nowhere", "--draft-model", PAIR[3]), "--model nowhere: no such folder"),
        ((*PAIR[:2], "--draft-model", "nowhere"), "--draft-model nowhere: no such folder"),
        ((*PAIR, "--peers", "emssd", "--data", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        ((*PAIR, "--peers", "emssd", "--data", "nowhere.txt"), "nowhere.txt: no such file"),
        ((*PAIR, "--python", "vlm=python"), "--python vlm=…: no such peer"),
        ((*PAIR, "--peers", "vllm", "--python", "vllm=nowhere/python"), "none of the peers is installed"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    words: tuple[str, ...],
    message: str,
    peers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_peers.py", *arguments(tmp_path, *words)])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("cpu_peers").main()
    assert stop.value.code
    assert message in f"{capsys.readouterr().err}{stop.value.code}"  # a text as code is printed by Python itself
