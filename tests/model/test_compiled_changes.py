"""`model.compile` never runs another model's program, nor an old one: what is modified, before or later, is noticed."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_testing.oracle import greedy_reference
from torch import nn
from transformers import OPTForCausalLM

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.errors import CompileError
from emssd.model import ModelOptions, TargetModel
from emssd.model.compile import tracing
from emssd.model.compile.compilable import Compiling
from emssd.native import cache_dir, load_kernels

from .conftest import opt

PROMPT = (3, 4, 5, 6, 7, 3, 4)
Change = Callable[[Any], object]


@pytest.fixture
def entry_copy(kept_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a cache that a test may spoil; to compile again takes the good files, and no time."""
    copy = tmp_path / "cache" / "models" / kept_program.name
    shutil.copytree(kept_program, copy)
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path / "cache"))

    def compile_program(target: TargetModel, folder: Path, hidden: tuple[int, ...]) -> None:
        for name in (tracing.PROGRAM, tracing.LINEARS, tracing.CONSTANTS):
            shutil.copy(kept_program / name, folder)

    monkeypatch.setattr(tracing, "compile_program", compile_program)
    return copy


asked_to_compile = Mock(side_effect=CompileError("it is asked to compile"))


def tokens(target: TargetModel) -> list[int]:
    options = EngineOptions(batch_size=1)
    engine = Engine.assemble(target, None, drafter="none", backend="ragged", budget="fixed", options=options, eos=())
    return list(engine.generate([PROMPT], 12)[0].token_ids)


def layer(model: Any) -> Any:
    return model.model.decoder.layers[0]


@pytest.mark.filterwarnings("error")
def test_weights_that_change_later_are_read_again(kept_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_ownership` tests other changes."""
    monkeypatch.setattr(tracing, "compile_program", asked_to_compile)
    target = TargetModel(opt(), ModelOptions(compile=True))
    before = tokens(target)
    assert before == greedy_reference(target.model, PROMPT, 12)
    layer(target.model).fc2.weight.data.neg_()
    assert tokens(target) == greedy_reference(target.model, PROMPT, 12) != before
    assert target.compiled is not None


CHANGES: dict[str, tuple[Change, str]] = {
    "a hook": (
        lambda model: layer(model).fc1.register_forward_hook(lambda *args: 2 * args[-1]),
        "has a forward hook on .*fc1",
    ),
    "an activation": (lambda model: setattr(layer(model), "activation_fn", nn.Tanh().eval()), "asked to compile"),
    "a forward of its own": (
        lambda model: setattr(layer(model).fc1, "forward", lambda x: 2 * nn.Linear.forward(layer(model).fc1, x)),
        "has its forward replaced on .*fc1",
    ),
}
"""The change of a model, and why it has no program then."""


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_whose_code_changes_before_or_later_runs_as_it_is(
    what: str, kept_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "compile_program", asked_to_compile)
    (change, why), model = CHANGES[what], opt()
    change(model)
    reason = f"the model runs without model.compile: .*{why}"
    changed = TargetModel(model, ModelOptions(compile=True))
    with pytest.warns(RuntimeWarning, match=reason):
        changed.compile()
    target = TargetModel(opt(), ModelOptions(compile=True))
    before, expected = tokens(target), greedy_reference(model, PROMPT, 12)
    change(target.model)
    with pytest.warns(RuntimeWarning, match=reason):
        after = tokens(target)
    assert tokens(changed) == after == expected != before
    assert target.compiled is None


class Own(OPTForCausalLM):
    """Of no library, so that a later process could not recognise it."""


@pytest.mark.usefixtures("entry_copy")
def test_the_program_of_a_class_of_the_users_own_is_for_this_process_alone() -> None:
    model = opt()
    kept = sorted((cache_dir() / "models").iterdir())
    model.__class__ = Own
    target = TargetModel(model, ModelOptions(compile=True))
    assert target.compiled is not None
    folder, alone = target.compiled.folder, r"compiled: just now, for this process alone: .*\.Own is no library's"
    assert re.match(alone, target.why_compiled)
    assert tokens(target) == greedy_reference(model, PROMPT, 12)
    again = TargetModel(model, ModelOptions(compile="auto"))
    assert (again.compiled, again.why_compiled) == (None, "not compiled: no program of it is kept")
    assert folder.exists()
    del target
    gc.collect()
    assert not folder.exists()
    assert sorted((cache_dir() / "models").iterdir()) == kept


def truncate(folder: Path) -> None:
    os.truncate(folder / tracing.PROGRAM, 5000)


def swap_linears(folder: Path) -> None:
    products = json.loads((folder / tracing.LINEARS).read_text())
    (joined,) = [linear for linear in products["linears"] if len(linear["weights"]) == 3]
    joined["weights"].reverse()
    (folder / tracing.LINEARS).write_text(json.dumps(products))


def other_linears(folder: Path) -> None:
    (folder / tracing.LINEARS).write_text(
        '{"linears": [{"weights": ["of.another.model"], "biases": [], "transposed": false}], "others": []}'
    )


class Hostile:
    def __reduce__(self) -> Any:
        return pytest.fail, ("the content of the cache was run",)


def pickle_constants(folder: Path) -> None:
    torch.save({"constant": Hostile()}, folder / tracing.CONSTANTS)


@pytest.mark.parametrize("spoil", [truncate, swap_linears, other_linears, pickle_constants])
def test_a_spoilt_program_is_compiled_again(
    spoil: Callable[[Path], None], entry_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(entry_copy)
    target = TargetModel(opt(), ModelOptions(compile=True))
    assert target.compiled is not None
    assert tokens(target) == greedy_reference(target.model, PROMPT, 12)
    (record,) = [record for record in caplog.records if record.name == "emssd" and record.levelname == "WARNING"]
    assert f"{entry_copy} is not " in record.getMessage()
    caplog.clear()
    assert TargetModel(opt(), ModelOptions(compile=True)).compiled is not None
    assert not [record for record in caplog.records if record.name == "emssd"]


def test_a_program_that_is_wrong_even_when_just_compiled_is_refused(
    entry_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tracing.compile_program

    def compile_wrongly(target: TargetModel, folder: Path, hidden: tuple[int, ...]) -> None:
        right(target, folder, hidden)
        swap_linears(folder)

    swap_linears(entry_copy)
    monkeypatch.setattr(tracing, "compile_program", compile_wrongly)
    reason = r"is not the program of this model, though it was just compiled: its logits differ by \d"
    target = TargetModel(opt(), ModelOptions(compile=True))
    with pytest.warns(RuntimeWarning, match=f"the model runs without model.compile: {entry_copy} {reason}"):
        target.compile()
    assert tokens(target) == greedy_reference(target.model, PROMPT, 12)


def test_a_program_in_a_cache_that_others_can_write_is_refused(entry_copy: Path) -> None:
    entry_copy.parents[1].chmod(0o777)
    reason = f"{entry_copy.parents[1]} belongs to .*set EMSSD_CACHE to a folder of your own"
    with pytest.warns(RuntimeWarning, match=f"the model runs without model.compile: {reason}"):
        assert TargetModel(opt(), ModelOptions(compile=True)).compiled is None


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_inductor_keeps_its_files_in_the_cache_unless_another_folder_is_set(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    untraceable = nn.Module()
    untraceable.model = nn.Module()
    with pytest.raises(CompileError), Compiling("Untraceable", 1) as work:
        tracing.compile_module(untraceable, (), tmp_path, work, own_linears=False)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (chosen or str(tmp_path / "inductor"))
    assert (tmp_path / "inductor").is_dir() == (chosen is None)


@pytest.mark.parametrize("mode", ["fake tensors", "export"])
def test_a_program_that_is_collected_while_another_is_traced_frees_its_weights(mode: str, kept_program: Path) -> None:
    target = TargetModel(opt(), ModelOptions(compile=True))
    assert target.compiled is not None
    program, handle = weakref.ref(target.compiled), target.compiled._program._handle
    ones = torch.ones(1, 2, 32)
    load_kernels().linear(ones, handle, 0, 96)
    if mode == "fake tensors":
        with torch._subclasses.FakeTensorMode():
            del target
            gc.collect()
    else:
        held = [target]
        del target

        class Collects(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                held.clear()
                gc.collect()
                return x + 1

        torch.export.export(Collects(), (torch.ones(2),), strict=False)
    assert program() is None
    with pytest.raises((IndexError, RuntimeError)):
        load_kernels().linear(ones, handle, 0, 96)
