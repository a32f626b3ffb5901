"""The C++ kernels on machines that cannot have them: why is said in a sentence, and decoding works without them."""

from __future__ import annotations

import re
import shutil
import stat
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.decoding.engine import Engine
from emssd.errors import PluginError
from emssd.model import ModelOptions, TargetModel
from emssd.native import NativeError, build, fallback_reason, free_module, load_kernels, why_unavailable
from tests.support.tiers import looped

NO_COMPILER = r"there is no C\+\+ compiler on PATH \(tried \$CXX, c\+\+, g\+\+, clang\+\+\)"
PROMPT = (3, 4, 5, 3, 4)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it, and a process that has not asked for the kernels; all is as before afterwards."""
    if sys.platform != "linux":
        pytest.skip("the C++ kernels are for Linux")
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path / "cache"))
    another_process(monkeypatch)
    return tmp_path / "cache"


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load", cache(build._load.__wrapped__))


@pytest.fixture
def no_compiler(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def script(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def kept(cache_folder: Path) -> list[str]:
    return sorted(path.name for path in cache_folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def failure() -> str:
    """Why there are no kernels, as one sentence that both ways to ask for them give."""
    reason = why_unavailable()
    assert reason is not None
    assert "\n" not in reason
    with pytest.raises(NativeError) as raised:
        load_kernels()
    assert str(raised.value) == reason
    return reason


@pytest.mark.usefixtures("no_compiler")
class TestWithoutACompiler:
    def test_the_reason_names_what_was_tried(self) -> None:
        assert fallback_reason() is None
        assert re.fullmatch(NO_COMPILER, failure())
        assert fallback_reason() == "attention in PyTorch: no C++ compiler"

    def test_the_backend_says_so_and_decodes_in_pytorch(self) -> None:
        model = tiny_model("llama", vocab_size=11)
        with pytest.warns(RuntimeWarning, match=f"attention runs in PyTorch, .*{NO_COMPILER}.*backend.kernels=torch"):
            engine = Engine.from_model(model, drafter="llma", backend="ragged")
        (done,) = engine.generate([PROMPT], 20)
        assert list(done.token_ids) == greedy_reference(model, PROMPT, 20, [2])

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    @pytest.mark.parametrize("config", [RaggedConfig(kernels=Kernels.torch), RaggedConfig(page_size=4)], ids=str)
    def test_options_that_need_none_give_no_warning(self, config: RaggedConfig) -> None:
        Engine.from_model(tiny_model("llama", vocab_size=11), drafter="none", backend=config)

    def test_who_insists_on_them_is_refused(self) -> None:
        refusal = f"backend 'ragged' cannot serve this model: {NO_COMPILER}; kernels=torch serves it"
        with pytest.raises(PluginError, match=refusal):
            Engine.from_model(tiny_model("llama"), drafter="none", backend=RaggedConfig(kernels=Kernels.fused))

    def test_a_model_to_be_compiled_runs_as_it_is(self) -> None:
        model = tiny_model("llama", vocab_size=11)
        with pytest.warns(RuntimeWarning, match=f"the model runs without model.compile: {NO_COMPILER}"):
            assert TargetModel(model, ModelOptions(compile=True)).compiled is None


def test_a_compiler_that_fails_is_quoted(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = """
case "$*" in *choice.cpp*) ;; *) shift $(($# - 1)); echo object > "$1"; exit 0 ;; esac
echo "In file included from errors.h" >&2
echo "choice.cpp:7:1: warning: strange" >&2
echo "choice.cpp:8:1: error: out of luck" >&2
echo "choice.cpp:9:1: error: and again" >&2
exit 1
"""
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "c++", complaint)))
    assert failure() == "building the C++ kernels failed: choice.cpp:8:1: error: out of luck"
    assert kept(cache_folder / "kernels") == []  # no half of a library
    made = len(kept(cache_folder))
    assert 0 < made < len(build._PARTS)  # those that began after it are not made
    assert kept(cache_folder) == ["part.o"] * made  # not made again


@pytest.fixture
def builds(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The commands of the compiler so far; it writes files of a few bytes, which nobody loads."""
    log = tmp_path / "commands"
    log.write_text("")
    compiler = f"""
echo "$*" >> {log}
while [ "$1" != -o ]; do shift; done
echo "output $(grep -c -e -shared {log})" > "$2"
"""
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "c++", compiler)))
    return lambda: log.read_text().splitlines()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The content of the libraries that were loaded."""
    contents: list[str] = []
    monkeypatch.setattr("torch.ops.load_library", lambda path: contents.append(Path(path).read_text()))
    return contents


def test_what_is_built_is_kept_and_loaded_the_next_time(
    cache_folder: Path, builds: Callable[[], list[str]], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        another_process(monkeypatch)
        assert why_unavailable() is None
    parts = len(build._PARTS)
    assert len(builds()) == parts + 1  # and a library
    assert not any("-ffast-math" in command for command in builds())  # it would change sums from build to build
    assert loaded == ["output 1\n"] * 2
    assert kept(cache_folder / "kernels") == ["emssd_native.so"]
    assert kept(cache_folder / "objects") == ["part.o"] * parts


def test_another_source_builds_its_own_part_and_the_library(
    builds: Callable[[], list[str]], loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Path(shutil.copytree(build._SOURCES, tmp_path / "cpp"))
    monkeypatch.setattr(build, "_SOURCES", sources)

    def rebuilt(changed: str) -> list[str]:
        (sources / changed).open("a").write("// changed")
        start = len(builds())
        another_process(monkeypatch)
        assert why_unavailable() is None
        *parts, library = builds()[start:]
        assert "-shared" in library
        return sorted(word for part in parts for word in part.split() if word.endswith(".cpp"))

    assert why_unavailable() is None
    assert rebuilt("choice.cpp") == [f"{sources}/choice.cpp"]
    assert rebuilt("tree.h") == [f"{sources}/{part}.cpp" for part in ("attention", "library")]
    computing = ("attention", "choice", "linear", "packed", "recurrence")
    assert rebuilt("vectors.h") == [f"{sources}/{part}.cpp" for part in computing]


def test_a_library_that_does_not_load_is_built_again(
    cache_folder: Path, builds: Callable[[], list[str]], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library needs another that is gone."""
    assert why_unavailable() is None
    another_process(monkeypatch)

    def load(path: str) -> None:
        if (content := Path(path).read_text()) == "output 1\n":
            raise OSError("libgomp.so.1: cannot open shared object file")
        loaded.append(content)

    monkeypatch.setattr("torch.ops.load_library", load)
    assert why_unavailable() is None
    assert loaded == ["output 1\n", "output 2\n"]


def test_a_library_without_the_operators_is_built_again_and_else_named(
    cache_folder: Path, builds: Callable[[], list[str]], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unavailable() is None
    another_process(monkeypatch)
    monkeypatch.setattr(build, "_OPERATORS", ("attend", "of_another_library"))
    assert re.fullmatch(r"\S+emssd_native.so does not hold the C\+\+ kernels; delete \S+/[0-9a-f]+", failure())
    assert sum("-shared" in command for command in builds()) == 2


def test_a_cache_of_others_is_refused_and_the_reason_is_short_too(
    cache_folder: Path, builds: Callable[[], list[str]], loaded: list[str]
) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    assert fallback_reason() is None  # nobody has asked for the kernels
    assert failure().startswith(f"there is no place for the C++ kernels: {cache_folder} belongs to user ")
    assert fallback_reason() == "attention in PyTorch: the cache cannot be used"
    assert (builds(), loaded) == ([], [])


def test_other_systems_are_told_apart(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert failure() == "the C++ kernels are written for Linux, and this is another system"


def test_another_source_pytorch_or_processor_has_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [build.kernels_key()]
    sources = shutil.copytree(build._SOURCES, tmp_path / "cpp")
    for owner, name, value in (
        (build, "_SOURCES", sources),
        (build, "_processor", lambda: "flags: none"),
        (torch, "__version__", "99.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(build.kernels_key())
    assert keys[1] == keys[0] == build.kernels_key()
    (sources / "vectors.h").write_text("// other")
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert len({*keys, build.kernels_key()}) == 4


SIZES = [(32, 48), (33, 17), (576, 64), (5, 1), (1090, 33)]


@pytest.mark.usefixtures("kernels")
class TestLinear:
    @looped("dtype", [torch.float32, torch.bfloat16])
    @looped(("num_in", "num_out"), SIZES)
    def test_a_token_has_the_same_bits_beside_any_number_of_others(
        self, dtype: torch.dtype, num_in: int, num_out: int
    ) -> None:
        kernels, generator = load_kernels(), torch.Generator().manual_seed(0)
        weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
        bias = torch.randn(num_out, generator=generator).to(dtype)
        tokens = torch.randn(1, 300, num_in, generator=generator).to(dtype)
        handle = kernels.new_module()
        kernels.add_weight(handle, weight, bias)
        kernels.add_weight(handle, weight, None)
        for index, added in enumerate([bias, torch.zeros(num_out)]):
            together = kernels.linear(tokens, handle, index, num_out)
            right = tokens.double() @ weight.double().T + added.double()
            # n products and a bias, each rounded in float32; what comes out once more in its own type
            magnitude = tokens.double().abs() @ weight.double().abs().T + added.double().abs()
            unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-24
            allowed = 2.0**-24 * (num_in + 2) * magnitude + unit * right.abs() * 1.01
            assert bool(((together.double() - right).abs() <= allowed).all())
            for count in (1, 2, 3, 8, 17, 33, 64):
                for start in (0, 300 - count):
                    part = kernels.linear(tokens[:, start : start + count], handle, index, num_out)
                    assert torch.equal(part, together[:, start : start + count]), (count, start)

    def test_handles_are_apart_and_freed(self) -> None:
        kernels = load_kernels()
        one, two = kernels.new_module(), kernels.new_module()
        for factor, handle in enumerate((one, two), start=1):
            kernels.add_weight(handle, torch.eye(4) * factor, None)
        ones = torch.ones(1, 3, 4)
        assert torch.equal(kernels.linear(ones, one, 0, 4), ones)
        assert torch.equal(kernels.linear(ones, two, 0, 4), 2 * ones)
        free_module()(int(one))
        assert torch.equal(kernels.linear(ones, two, 0, 4), 2 * ones)
        with pytest.raises((IndexError, RuntimeError)):
            kernels.linear(ones, one, 0, 4)
