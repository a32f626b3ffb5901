"""``emssd-train`` on the demo: the head loads and drafts, the seed decides all, and interruptions change nothing."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_eagle3.loading import load_eagle3

import emssd_train.texts
from emssd import demo
from emssd.heads import TargetSizes
from emssd_train.cli import main
from emssd_train.progress import Bar

SMALL = ["--limit", "7", "--held-out", "2", "--max-new-tokens", "8", "--rows", "2", "--depth", "2", "--epochs", "2"]
SMALL += ["--intermediate-size", "16", "--num-kv-heads", "1", "--draft-vocab-size", "50", "--save-every", "1"]
FILES = ("config.json", "model.safetensors", "texts.jsonl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ask": prompt.text[-200:]}) + "\n" for prompt in demo.prompts(8)))
    return path


@pytest.fixture(scope="module")
def train(data: Path) -> Callable[..., None]:
    def run(output: Path, *more: str) -> None:
        main(
            ["eagle3", "--model", "demo", "--data", str(data), "--field", "ask", "--output", str(output), *SMALL, *more]
        )

    return run


@pytest.fixture(scope="module")
def trained(train: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "first"
    train(folder)
    return folder


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def test_the_head_loads_without_a_warning(trained: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_eagle3(str(trained), TargetSizes(2048, 192, 6), dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.layers.layers == (1, 3, 6)
    assert loaded.layers.other is None
    assert loaded.head.target_ids is not None
    assert len(loaded.head.target_ids) == 50
    config = json.loads((trained / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "demo"
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (50, True)


def test_what_it_is_worth_is_kept(trained: Path) -> None:
    record = json.loads((trained / "training.json").read_text())
    drafted, accepted = record["held_out"]["drafted"], record["held_out"]["accepted"]
    assert len(drafted) == len(accepted) == 2
    assert 0 < drafted[1] <= drafted[0]
    assert record["held_out"]["tau"] >= 1
    assert record["options"]["draft_vocab_size"] == 50
    assert len((trained / "texts.jsonl").read_text().splitlines()) == 5


def test_the_seed_decides_every_byte(trained: Path, train: Callable[..., None], tmp_path: Path) -> None:
    train(tmp_path / "same")
    train(tmp_path / "other", "--seed", "1")
    same, other, first = content(tmp_path / "same"), content(tmp_path / "other"), content(trained)
    assert same == first
    assert [one == two for one, two in zip(other, first, strict=True)] == [True, False, True]


@pytest.mark.parametrize("steps", [1, 4])
def test_an_interrupted_training_goes_on_exactly(
    steps: int, trained: Path, train: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of a pass over the texts: each has three steps."""

    def interrupt(bar: Any, done: int, total: int, loss: float | None) -> None:
        if done > steps:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "tell_step", interrupt)
        with pytest.raises(SystemExit) as leaving:
            train(tmp_path / "head")
    assert leaving.value.code == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert not (tmp_path / "head" / "config.json").exists()
    newest = tmp_path / "head" / "checkpoints" / f"checkpoint-{steps}"
    (newest.parent / f"checkpoint-{steps + 1}").mkdir(exist_ok=True)  # one that was not written whole
    train(tmp_path / "head", "--resume")
    assert content(tmp_path / "head") == content(trained)
    train(tmp_path / "head", "--resume")  # it is done, and stays as it is
    assert content(tmp_path / "head") == content(trained)


def test_texts_that_are_there_are_not_made_again(
    trained: Path, train: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emssd_train.texts, "_TOGETHER", 2)
    folder = tmp_path / "head"
    told = list[int]()

    def interrupt(bar: Any, done: int, said: str = "") -> None:
        told.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "tell", interrupt)
        with pytest.raises(SystemExit):
            train(folder)
    with (folder / "texts.jsonl").open("a") as out:
        out.write('{"prompt": [1], "outp')  # as a full disk leaves it
    told.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "tell", lambda bar, done, said="": told.append(done))
        train(folder, "--resume")
    assert told[0] == 2
    assert [json.loads(line) for line in content(folder)[2].splitlines()] == [
        json.loads(line) for line in content(trained)[2].splitlines()
    ]


def refused(capsys: pytest.CaptureFixture[str], call: Callable[[], None]) -> str:
    """The sentence that a call ends with."""
    with pytest.raises(SystemExit) as leaving:
        call()
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("emssd-train: error: ")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--held-out", "7"], "--held-out is 7, and there are 7 prompts"),
        (["--hidden-layers", "1,2,7"], "--hidden-layers is 1,2,7; it must be different numbers from 0"),
        (["--hidden-layers", "2,2,3"], "different numbers"),
        (["--hidden-layers", "low"], "give whole numbers, as in 2,6,9"),
        (["--num-kv-heads", "2"], "--num-kv-heads is 2; it must divide the head's 3 attention heads"),
        (["--num-heads", "5", "--num-kv-heads", "5"], "a head of these sizes cannot be"),
        (["--epochs", "0"], "--epochs is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--lr", "0"], "--lr is 0.0; it must be above 0"),
        (["--field", "question"], "has no field 'question'; it has 'ask'. Choose with --field or --template"),
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such file"),
        (["--max-new-tokens", "512"], "leaves room for --max-new-tokens 512"),
        (["--model", "./nowhere"], "there is no such folder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    options: list[str], words: str, train: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, lambda: train(tmp_path / "head", *options))
    assert not (tmp_path / "head").exists()


def test_a_folder_is_neither_overwritten_nor_taken_for_another_training(
    trained: Path, train: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(trained)
    assert "exists already; add --resume" in refused(capsys, lambda: train(trained))
    said = refused(capsys, lambda: train(trained, "--resume", "--lr", "0.5"))
    assert "was begun with --lr 0.001, and this is 0.5" in said
    (tmp_path / "note").touch()
    assert "holds no training" in refused(capsys, lambda: train(tmp_path, "--resume"))
    assert content(trained) == before


def test_texts_of_other_prompts_and_damaged_ones_are_refused(
    trained: Path, data: Path, train: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("options.json", "texts.jsonl"):
        (folder / name).write_bytes((trained / name).read_bytes())
    lines = (trained / "texts.jsonl").read_text().splitlines(keepends=True)
    (folder / "texts.jsonl").write_text("".join(reversed(lines)))
    assert "texts of other prompts" in refused(capsys, lambda: train(folder, "--resume"))
    (folder / "texts.jsonl").write_text("".join(["{}\n", *lines[1:]]))
    assert "damaged in line 1" in refused(capsys, lambda: train(folder, "--resume"))


def test_without_its_library_it_says_how_to_get_it(
    train: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert "pip install 'emssd[train]'" in refused(capsys, lambda: train(tmp_path / "head"))
