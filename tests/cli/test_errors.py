"""Mistakes of users: one sentence on stderr, exit status 2, no traceback, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiers import looped

from .conftest import assert_said

OFFERED = {
    "drafter": ["draft_model", "llma", "llma_original", "none"],
    "backend": ["flashinfer", "padded", "ragged", "unpad_both", "unpad_inputs", "unpad_kv"],
    "data": ["cnn_dailymail", "demo", "gsm8k", "hf", "jsonl", "mt_bench", "spec_bench", "text"],
}


@looped("kind", OFFERED)
def test_an_unknown_name_is_answered_with_the_known_ones(kind: str, decode: Callable) -> None:
    sentence = decode(f"{kind}=lama").sentence
    guess = " did you mean 'llma'?" if kind == "drafter" else ""
    assert sentence.startswith(f"unknown {kind} 'lama';{guess} choose one of ")
    assert set(OFFERED[kind]) <= set(sentence.partition("choose one of ")[2].split(", "))


@looped("arguments", ["drafter=none,lama", "drafter=lama,none"])
def test_an_unknown_name_in_a_sweep_stops_it_before_it_starts(arguments: str, decode: Callable) -> None:
    result = decode("-m", arguments)
    assert result.sentence.startswith("unknown drafter 'lama'; did you mean 'llma'? ")
    assert result.files.keys() == {"multirun.yaml"}  # Hydra's own; no run


@looped("path", ["gpt-that-is-not-there", "./folder/that/is/not/there", "notes.txt"])
def test_a_model_path_that_holds_no_model(path: str, decode: Callable, work: Path) -> None:
    (work / "notes.txt").write_text("not a model")
    said = f"cannot load the model {path!r}: …Give a local folder with config.json and weights, a model id of the "
    said += "Hugging Face hub, or 'demo' for the embedded model."
    assert_said(decode(f"model.path={path}").sentence, said)


def test_a_length_or_a_folder_that_cannot_be(decode: Callable, work: Path) -> None:
    assert decode("model.max_model_len=97").sentence == "max_model_len is 97; this model takes 2 to 96 tokens"
    (work / "taken").write_text("")
    sentence = decode("output_dir=taken/out").sentence
    assert sentence == "cannot write to output_dir=taken/out: Not a directory; set output_dir to a writable folder"


@looped("choice", ["backend=flashinfer", "-m backend=ragged,flashinfer"])
def test_flashinfer_without_cuda_says_why_not_and_what_instead(choice: str, decode: Callable) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = decode(*choice.split())
    assert result.sentence.startswith("backend 'flashinfer' is not available: it needs an NVIDIA GPU, and ")
    assert result.sentence.endswith("; use backend=ragged, which runs on any device.")
    assert not list(result.folder.glob("*/"))  # no run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("name", ["generations.jsonl", "config.yaml", "metrics.json"])
def test_a_full_disk(name: str, decode: Callable, work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / (name if name == "generations.jsonl" else f"{name}.part")).symlink_to("/dev/full")
    result = decode()
    kept = "finished rows stay in out, and resume=true keeps them"
    if name == "generations.jsonl":
        kept = "the rows before are kept. Make room, and go on with resume=true"
    assert result.sentence == f"cannot write out/{name}: No space left on device; {kept}"
    assert name != "metrics.json" or len(result.rows) == 5


def test_ctrl_c_keeps_the_finished_rows(decode: Callable, fail_at: Callable) -> None:
    fail_at(35, KeyboardInterrupt())
    result = decode("batch_size=1", "drafter=none")
    assert result.status == 130
    assert result.err.endswith(
        "emssd: interrupted; the rows that were finished are in out/, "
        "and resume=true output_dir=out goes on from there\n"
    )
    assert 1 <= len(result.rows) < 5
    assert "metrics.json" not in result.files


@looped("argument", ["batch_size", "drafter", "model.path"])
def test_of_a_long_value_the_beginning_is_repeated(argument: str, emssd: Callable) -> None:
    sentence = emssd(f"{argument}={3000 * 'x'}", "output_dir=out").sentence
    assert "xxxx" in sentence or "File name too long" in sentence
    assert len(sentence) < 1000
