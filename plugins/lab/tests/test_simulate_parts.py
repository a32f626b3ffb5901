"""The simulator's parts: trace files, step-time curves, recorders, and the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from emssd_lab.simulate import RequestTrace, StageTrace, Trace, load_trace
from emssd_lab.simulate.__main__ import main
from emssd_lab.simulate.curves import Roofline
from emssd_lab.simulate.traces import save_trace

from emssd.errors import ConfigError
from tests.support.tiers import looped

STAGE = StageTrace((2, 0, 1), (1, 0, 0))
REQUEST = RequestTrace("a", 3, 9, (STAGE, StageTrace((1, 2, 0), (0, 1, 0))))


def test_a_trace_file_gives_the_trace_back(tmp_path: Path) -> None:
    trace = Trace((4, 2), (REQUEST, dataclasses.replace(REQUEST, request_id="b")))
    save_trace(trace, tmp_path / "trace.jsonl")
    assert load_trace(tmp_path / "trace.jsonl") == trace


@looped(
    ("make", "error"),
    [
        (lambda: StageTrace((2, 0, 1), (1, 0)), "not as many entries"),
        (lambda: StageTrace((2, 0, 1), (3, 0, 0)), "3 of 2 drafted tokens are right at position 0 of 3"),
        (lambda: StageTrace((2, 0, 2), (0, 0, 2)), "2 of 2 drafted tokens are right at position 2"),
        (lambda: RequestTrace("a", 0, 9, (STAGE,)), r"request 'a' has 0 prompt tokens, outputs of \[3\] tokens"),
        (lambda: RequestTrace("a", 3, 2, (STAGE,)), "a limit of 2"),
        (lambda: RequestTrace("a", 3, 9, ()), r"outputs of \[\] tokens"),
        (lambda: RequestTrace("a", 3, 9, (STAGE, StageTrace((1,), (0,)))), r"outputs of \[1, 3\] tokens"),
        (lambda: Trace((2, 2), (REQUEST, REQUEST)), "same id"),
        (lambda: Trace((2, 1), (REQUEST,)), r"drafts of up to \[2, 2\] tokens .* at most \[2, 1\]"),
        (lambda: Trace((2,), (REQUEST,)), r"at most \[2\]"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make()


@looped(
    "text, error",
    [
        *((text, r"holds no acceptance trace .* python -m emssd_lab.simulate record") for text in
          ("", "[]\n", "nonsense", '{"num_speculative_tokens": 2}\n{"request_id": "a"}\n')),
        (None, r"file: request 'a' has 0 prompt tokens"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_trace_or_a_wrong_one_is_named(text: str | None, error: str, tmp_path: Path) -> None:
    save_trace(Trace((4, 4), (REQUEST,)), path := tmp_path / "file")
    path.write_text(path.read_text().replace('"num_prompt":3', '"num_prompt":0') if text is None else text)
    with pytest.raises(ConfigError, match=error):
        load_trace(path)


def test_a_roofline_is_flat_where_weights_take_the_time_and_steep_where_arithmetic_does() -> None:
    curve = Roofline(
        num_params=1e9, weight_bytes=2e9, kv_bytes_per_token=1e5, bandwidth=1e12, flops=1e14, overhead=1e-4
    )
    assert curve.verify_seconds(1, 0) == curve.verify_seconds(100, 0) == pytest.approx(2e-3 + 1e-4)
    assert curve.verify_seconds(200, 1000) == pytest.approx(4e-3 + 1e-4 + 1e-4)
    assert curve.draft_seconds(0, 4, 8, 1000) == 0.0
    drafted = dataclasses.replace(curve, drafts=(None, dataclasses.replace(curve, overhead=0.0)))
    assert drafted.draft_seconds(1, 4, 800, 1000) == pytest.approx(4 * (4e-3 + 1e-4))
    assert drafted.draft_seconds(0, 4, 800, 1000) == drafted.draft_seconds(1, 0, 0, 1000) == 0.0


def test_record_then_run_gives_the_tokens_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = (str(tmp_path / name) for name in ("trace.jsonl", "figures.json"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("integers are\n\nfloats are numbers, floats are numbers, floats are\n")
    main(["record", trace, "--prompts", str(prompts), "--new", "12", "--dtype", "float32"])
    assert "2 requests" in capsys.readouterr().out
    main(["run", "--trace", trace, "--budget", "fixed", "--option", "num_tokens=8", "--json", figures])
    assert "simulated, not measured" in capsys.readouterr().out
    values = json.loads(Path(figures).read_text())
    assert values["num_new_tokens"] == sum(row.output_length for row in load_trace(Path(trace)))
    assert values["seconds"] > 0


def test_run_makes_up_requests(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--requests", "6", "--new", "20", "--prompt", "40", "--batching", "static", "--max-steps", "3"])
    main(["run", "--requests", "6", "--new", "20", "--concentration", "3", "--worst-case", "--max-kv-tokens", "500"])
    assert "120" in capsys.readouterr().out
    main(["run", "--requests", "6", "--new", "20", "--branches", "3,2", "--chances", "0.6,0.2;0.5", "--tells"])
    assert "120" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run", "--p", "1.5"], "p is 1.5"),
        (["run", "--batch-size", "0"], "batch_size is 0"),
        (["run", "--curve", "nothing"], "--curve is nothing; choose one of 70b"),
        (["run", "--trace", "nothing"], "trace nothing cannot be read"),
        (["run", "--budget", "nothing"], "unknown budget 'nothing'"),
        (["run", "--option", "length=3"], "no option 'length'. It has num_tokens"),
        (["run", "--option", "num_tokens=x"], "'x' is no number"),
        (["run", "--max-steps", "0"], "max_steps is 0"),
        (["run", "--requests", "1", "--new", "1", "--json", "/nowhere/a.json"], "cannot be written"),
        (["record", "out", "--prompts", "nothing"], "--prompts nothing: no such file"),
    ],
)
def test_wrong_input_ends_with_a_sentence(
    arguments: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("emssd_lab.simulate: error: ")
    assert error in shown


def test_the_commands_in_the_docs_that_need_no_model_run() -> None:
    text = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m emssd_lab\.simulate (run (?!--trace).*)$", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        main(shlex.split(command))
