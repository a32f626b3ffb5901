"""Settings of the whole test suite."""

from __future__ import annotations

import gc
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

gc.disable()  # until all tests are collected; imports leave no garbage, and to look for it takes a third of their time

_NUM_THREADS = 1  # tiny tensors; two test processes with two threads each are slower than four with one
torch.set_num_threads(_NUM_THREADS)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=10, **_COMMON)
settings.register_profile("nightly", max_examples=60, **_COMMON)
settings.register_profile("thorough", max_examples=300, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


_UNSTEADY = 1.7


def _cpu_seconds() -> float:
    """CPU seconds that this process and its ended children have used."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``nox -s tests`` sets the limit."""
    parser.addoption("--cpu-limit", type=float, metavar="SECONDS", help="fail a test that uses more CPU than this")


def pytest_configure(config: pytest.Config) -> None:
    """A plugin that fails to load is an error; named here, as pytest.ini would import emssd before coverage starts."""
    config.addinivalue_line("filterwarnings", "error::emssd.hooks.registry.PluginWarning")
    if config.getoption("--cpu-limit") is not None:
        config.pluginmanager.register(_Limit(config.getoption("--cpu-limit")))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze imported objects, so that the garbage collector skips them: it takes 0.1 s or more for each search."""
    gc.enable()
    gc.collect()
    gc.freeze()


class _Limit:
    """Fails a test that uses more CPU: seconds of this process and its children, as machines are shared.

    First imports do not count, since they fall to whichever test comes first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        with _first_imports() as imports:
            begun = _cpu_seconds()
            yield
            used = _cpu_seconds() - begun - sum(imports)
        if used > self._seconds and not any(item.iter_markers("costly")) and used > self._seconds * _slowness():
            pytest.fail(
                f"this test used {used:.1f} s of CPU; CI allows {self._seconds:g} s. Make it smaller; or mark it "
                '`nightly`, if a quicker test of CI finds the same faults; or mark it `costly("reason")`, if none does',
                pytrace=False,
            )


def _slowness() -> float:
    """The CPU time that this machine takes now ÷ that of a quiet one: of a loop, and of a process that imports torch.

    At least `_UNSTEADY`: the same suite has taken 870 and 1,460 s of CPU, as page faults and shared caches vary, which
    no loop sees.
    """
    begun, number = _cpu_seconds(), 0
    while number < 500_000:
        number += 1 + number % 1
    counted = _cpu_seconds()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(_UNSTEADY, (counted - begun) / 0.025, (_cpu_seconds() - counted) / 1.4)


@contextmanager
def _first_imports() -> Iterator[list[float]]:
    """The CPU seconds of each outermost import of a module that was not imported before."""
    spent: list[float] = []
    execute = SourceFileLoader.exec_module
    depth = 0

    def timed(loader: SourceFileLoader, module: ModuleType) -> None:
        nonlocal depth
        begun, depth = _cpu_seconds(), depth + 1
        try:
            execute(loader, module)
        finally:
            depth -= 1
            if not depth:
                spent.append(_cpu_seconds() - begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceFileLoader, "exec_module", timed)
        yield spent


def pytest_runtest_setup() -> None:
    """No test, and no fixture, inherits the threads of one before it, nor the logger that a run has set up."""
    torch.set_num_threads(_NUM_THREADS)
    logger = logging.getLogger("emssd")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail a test that changes what later tests start from. Filters of warnings are pytest's, which restores them."""
    before = _process_state()
    yield
    after = _process_state()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        pytest.fail(f"this test leaves {', '.join(changed)} changed; undo it, as with monkeypatch", pytrace=False)


_FREE = (
    "PYTEST_",
    "GOMP_",
    "HF_HUB_",
    "RAY_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
)  # variables of pytest, and those that commands set for their process


def _process_state() -> dict[str, object]:
    """Variables of the environment, and the global settings of logging and of PyTorch that tests change, by name."""
    settings: dict[str, object] = {
        "the level of the root logger": logging.root.level,
        "the level of Transformers' logger": logging.getLogger("transformers").level or logging.WARNING,
        "logging.disable": logging.root.manager.disable,
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    return settings | {name: value for name, value in os.environ.items() if not name.startswith(_FREE)}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels and programs lie in ``$EMSSD_CACHE`` if set, so that later runs find them, else in a temporary folder.

    The kernels are built here, by one of the test processes, and not while a test looks at the clock.
    """
    from emssd.native import private_folder, why_unavailable

    os.environ.setdefault("EMSSD_CACHE", str(tmp_path_factory.getbasetemp().parent / "emssd-cache"))
    with FileLock(private_folder() / "tests.lock"):
        why_unavailable()


@pytest.fixture(scope="session")
def kernels(compiled_once: None) -> None:
    """For tests of the C++ kernels: skipped where no compiler is, failed where one is and they cannot be built."""
    from emssd.native import why_unavailable
    from emssd.native.build import compiler

    if sys.platform != "linux" or compiler() is None:
        pytest.skip("the C++ kernels need Linux and a C++ compiler")
    assert why_unavailable() is None


def _shared() -> Path:
    return Path(__file__).resolve().parents[1] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the trained pair and the real prompts; not part of the project."""
    folder = _shared()
    if not folder.is_dir():
        pytest.skip("the folder ../shared with the trained model pair and real prompts is not here")
    return folder
