"""``emssd-train`` on the demo: what is trained drafts, the seed decides all, and interruptions change nothing."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import emssd_heads.training.texts
import pytest
import torch
from emssd_heads.config import TargetSizes
from emssd_heads.eagle3.drafter import load_eagle3
from emssd_heads.medusa import MedusaConfig
from emssd_heads.medusa.drafter import load_medusa
from emssd_heads.options import TreeKind
from emssd_heads.pard import PardConfig
from emssd_heads.training import job
from emssd_heads.training.cli import main
from emssd_testing.models import tiny_model
from safetensors.torch import load_file
from transformers import AutoTokenizer

from emssd import demo
from emssd.cli.progress import Bar
from emssd.decoding.engine import Engine
from emssd.decoding.options import OnDrafterError
from emssd.model import ModelOptions, load_model
from tests.support.tiers import few, looped

SMALL = ["--limit", "7", "--held-out", "2", "--max-new-tokens", "8", "--rows", "2", "--depth", "2", "--epochs", "2"]
SMALL += ["--save-every", "1"]
OWN = {
    "eagle3": ["--intermediate-size", "16", "--num-kv-heads", "1", "--draft-vocab-size", "50"],
    "medusa": ["--draft-vocab-size", "50"],
    "pard": ["--draft", "demo-draft"],
}
FILES = ("config.json", "model.safetensors", "texts.jsonl")
Train = Callable[..., None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ask": prompt.text[-200:]}) + "\n" for prompt in demo.prompts(8)))
    return path


@pytest.fixture(scope="module")
def train(data: Path) -> Train:
    def run(output: Path, *more: str, kind: str = "eagle3") -> None:
        options = ["--model", "demo", "--data", str(data), "--field", "ask", "--output", str(output)]
        main([kind, *options, *SMALL, *OWN[kind], *more])

    return run


@pytest.fixture(scope="module")
def trained_by(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of drafter, which is trained once."""

    @cache
    def folder(kind: str) -> Path:
        made = tmp_path_factory.mktemp(kind) / "first"
        train(made, kind=kind)
        return made

    return folder


@pytest.fixture(scope="module")
def trained(trained_by: Callable[[str], Path]) -> Path:
    return trained_by("eagle3")


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_the_head_loads_without_a_warning(trained: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_eagle3(str(trained), TargetSizes(2048, 192, 6))
    assert (loaded.layers, len(loaded.head.target_ids)) == ((1, 3, 6), 50)
    config = read(trained / "config.json")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "demo"
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (50, True)


@pytest.mark.parametrize("kind", ["medusa", "pard"])
def test_other_kinds_are_opened_and_draft(kind: str, trained_by: Callable[[str], Path]) -> None:
    folder = trained_by(kind)
    medusa = MedusaConfig(path=str(folder), tree=TreeKind.dynamic)
    drafter: Any = medusa if kind == "medusa" else PardConfig(path=str(folder), num_speculative_tokens=2)
    engine = Engine.from_pretrained(
        "demo", drafter=drafter, budget="fixed", compile=False, on_drafter_error=OnDrafterError.fail
    )
    engine.generate([prompt.text for prompt in demo.prompts(4)], 16)
    assert engine.report.num_accepted > 0
    assert read(folder / "training.json")["options"]["kind"] == kind


def test_files_of_other_kinds(trained_by: Callable[[str], Path]) -> None:
    config = read(trained_by("medusa") / "config.json")
    assert (config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]) == (2, 1, 50)
    assert len(load_medusa(str(trained_by("medusa")), TargetSizes(2048, 192, 6)).head.target_ids) == 50
    model, tokenizer = load_model(ModelOptions(str(trained_by("pard")), compile=False))
    assert (model.vocab_size, model.model.config.pard_token, len(tokenizer)) == (2049, 2048, 2048)


def test_what_it_is_worth_is_kept(trained: Path) -> None:
    record = read(trained / "training.json")
    drafted, accepted = record["held_out"]["drafted"], record["held_out"]["accepted"]
    assert len(accepted) == 2
    assert 0 < drafted[1] <= drafted[0]
    assert record["held_out"]["tau"] >= 1
    assert record["options"]["draft_vocab_size"] == 50
    assert len((trained / "texts.jsonl").read_text().splitlines()) == 5


def test_the_seed_decides_every_byte(trained: Path, train: Train, tmp_path: Path) -> None:
    train(tmp_path / "same")
    train(tmp_path / "other", "--seed", "1")
    same, other, first = content(tmp_path / "same"), content(tmp_path / "other"), content(trained)
    assert same == first
    assert [one == two for one, two in zip(other, first, strict=True)] == [True, False, True]


@pytest.mark.parametrize("kind", few(["eagle3", "medusa", "pard"], ci=1))
def test_bfloat16_in_training_gives_nearly_the_same(
    kind: str, trained_by: Callable[[str], Path], train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "fast", "--bf16", kind=kind)
    want, got = (load_file(folder / "model.safetensors") for folder in (trained_by(kind), tmp_path / "fast"))
    assert not torch.equal(*(torch.cat([each.flatten() for each in weights.values()]) for weights in (got, want)))
    # What is added to all keys changes no attention, so the gradient of that bias is rounding alone.
    for name in (name for name in want if not name.endswith("k_proj.bias")):
        assert torch.dist(got[name].float(), want[name].float()) <= 0.1 * want[name].float().norm(), name


Tell = Callable[[int, int | None], bool]


def train_watched(stops: Tell, train: Train, output: Path, *more: str, kind: str = "eagle3") -> int | str | None:
    """Train until the bar tells a number of done and of all with which it `stops`; the exit status."""

    def tell(bar: Any, done: int, live: str = "", total: int | None = None) -> None:
        if stops(done, total):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "tell", tell)
        try:
            train(output, *more, kind=kind)
        except SystemExit as leaving:
            return leaving.code
        finally:
            signal.signal(signal.SIGINT, before)
    return 0


@pytest.mark.parametrize(("kind", "steps"), few([("eagle3", 4), ("eagle3", 1), ("medusa", 4), ("pard", 4)], ci=1))
def test_an_interrupted_training_goes_on_exactly(
    kind: str, steps: int, trained_by: Callable, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of a pass over the texts, with three steps each, and long before a checkpoint is due."""
    trained, folder, told = trained_by(kind), tmp_path / "head", list[int]()
    rarely = ["--save-every", "99"]
    assert (
        train_watched(lambda done, total: total is not None and done == steps, train, folder, *rarely, kind=kind) == 130
    )
    assert "--resume goes on" in capsys.readouterr().err
    assert not (folder / "config.json").exists()
    (folder / "checkpoints" / f"checkpoint-{steps + 1}").mkdir(exist_ok=True)  # one that was not written whole
    watch = lambda done, total: total is not None and bool(told.append(done))  # noqa: E731
    for _ in range(2):  # then it is done, and stays as it is
        assert train_watched(watch, train, folder, "--resume", *rarely, kind=kind) == 0
        assert content(folder) == content(trained)
    assert told[0] == steps + 1


def test_a_large_vocabulary_is_drafted_in_part_and_that_is_said(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_MOST_DRAFTED", 50)
    monkeypatch.setitem(OWN, "medusa", ["--epochs", "1"])
    train(tmp_path / "head", kind="medusa")
    assert read(tmp_path / "head" / "config.json")["truncated_vocab_size"] == 50
    assert "drafts the 50 most frequent of the target's 2048 tokens; --draft-vocab-size" in capsys.readouterr().err


def test_texts_that_are_there_are_not_made_again(
    trained: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emssd_heads.training.texts, "_TOGETHER", 2)
    folder, told = tmp_path / "head", list[int]()
    assert train_watched(lambda done, _: done == 3, train, folder) == 130
    with (folder / "texts.jsonl").open("a") as out:
        out.write('{"prompt": [1], "outp')  # as a full disk leaves it
    assert train_watched(lambda done, _: bool(told.append(done)), train, folder, "--resume") == 0
    assert told[0] == 2
    texts, wanted = (content(each)[2].splitlines() for each in (folder, trained))
    assert list(map(json.loads, texts)) == list(map(json.loads, wanted))


@pytest.fixture
def refused(train: Train, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(output, *options)`` is the sentence that a training ends with."""

    def run(output: Path, *options: str, kind: str = "eagle3") -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            train(output, *options, kind=kind)
        assert leaving.value.code == 2
        *usage, message = capsys.readouterr().err.splitlines()
        assert not usage or "unrecognized arguments" in message
        assert message.startswith("emssd-train: error: ")
        return message

    return run


REFUSED = {
    "--held-out 7": "--held-out is 7, and there are 7 prompts",
    "--hidden-layers 1,2,7": "--hidden-layers is 1,2,7; it must be different numbers from 0",
    "--hidden-layers 2,2,3": "different numbers",
    "--hidden-layers low": "give whole numbers, as in 2,6,9",
    "--num-kv-heads 2": "--num-kv-heads is 2; it must divide the head's 3 attention heads",
    "--num-heads 5 --num-kv-heads 5": "a head of these sizes cannot be",
    "--epochs 0": "--epochs is 0; it must be at least 1",
    "--field question": "has no field 'question'; it has 'ask'. Choose with --field or --template",
    "--data nowhere.jsonl": "--data nowhere.jsonl: no such file",
    "--max-new-tokens 512": "leaves room for --max-new-tokens 512",
    "--model ./nowhere": "there is no such folder",
    "pard --draft ./nowhere": "there is no such folder",
    "medusa --hidden-layers 1": "unrecognized arguments: --hidden-layers 1",  # options of other kinds
    "medusa --draft 1": "unrecognized arguments: --draft 1",
    "pard --num-layers 1": "unrecognized arguments: --num-layers 1",
}


@looped("given", REFUSED, at_a_time=7)
def test_what_cannot_be_is_refused_before_anything_is_written(given: str, refused: Callable, tmp_path: Path) -> None:
    kind, *options = given.split() if given.split()[0] in OWN else ["eagle3", *given.split()]
    assert REFUSED[given] in refused(tmp_path / "head", *options, kind=kind)
    assert not (tmp_path / "head").exists()


def test_a_draft_model_must_fit_the_target(refused: Callable, tmp_path: Path) -> None:
    draft, tokenizer = tmp_path / "draft", AutoTokenizer.from_pretrained(demo.model_path("draft"))
    tiny_model("opt", vocab_size=2049, max_model_len=24).save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    said = refused(tmp_path / "head", "--draft", str(draft), kind="pard")
    assert "leaves room for --max-new-tokens 8 in the model's 24" in said
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(draft)
    said = refused(tmp_path / "head", "--draft", str(draft), kind="pard")
    assert "has not the target's tokenizer; give a model that has it" in said
    assert not (tmp_path / "head").exists()


def test_a_folder_is_neither_overwritten_nor_taken_for_another_training(
    trained: Path, refused: Callable, tmp_path: Path
) -> None:
    before = content(trained)
    assert "exists already; add --resume" in refused(trained)
    assert "was begun with --lr 0.001, and this is 0.5" in refused(trained, "--resume", "--lr", "0.5")
    assert "was begun with KIND eagle3, and this is medusa" in refused(trained, "--resume", kind="medusa")
    (tmp_path / "note").touch()
    assert "holds no training" in refused(tmp_path, "--resume")
    assert content(trained) == before


def test_texts_of_other_prompts_and_damaged_ones_are_refused(trained: Path, refused: Callable, tmp_path: Path) -> None:
    (tmp_path / "options.json").write_bytes((trained / "options.json").read_bytes())
    lines = (trained / "texts.jsonl").read_text().splitlines(keepends=True)
    for texts, said in (([*reversed(lines)], "texts of other prompts"), (["{}\n", *lines[1:]], "damaged in line 1")):
        (tmp_path / "texts.jsonl").write_text("".join(texts))
        assert said in refused(tmp_path, "--resume")


def test_without_its_library_it_says_how_to_get_it(
    refused: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert "pip install 'emssd[train]'" in refused(tmp_path / "head")
