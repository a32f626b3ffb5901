"""Runs tests on copies of the project, with a fault or without; each run is a fork of a process with PyTorch loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from .fault import ROOT, Fault

_LONGEST = 300.0  # seconds of one run with a fault
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build", "outputs", "multirun", "results")


class Result(NamedTuple):
    """The results of the tests of one run; all are names without parameters.

    Attributes:
        passed, failed: tests that ran.
        error: why the run says nothing; ``None`` if it does.
        seconds: that it took.
    """

    passed: list[str]
    failed: list[str]
    error: str | None
    seconds: float


class Copy:
    """A copy of the project with a cache of its own, which a fault can be planted in.

    Args:
        folder: where to make it.
        cache: what is compiled already.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.tree, self._cache, self._own = folder / "tree", cache, folder / "cache"
        shutil.copytree(ROOT, self.tree, ignore=_LEFT_OUT)
        self.log = folder / "log"

    def start(self, tests: Seq[str], options: Seq[str], fault: Fault | None = None) -> Run:
        """Start `tests`; of a copy, one run at a time."""
        changed = None
        if fault is not None:
            changed = fault.place(self.tree)
            shutil.rmtree(self._own, ignore_errors=True)
            shutil.copytree(self._cache, self._own)
        cache = self._cache if fault is None else self._own
        return Run(self, cache, changed, [*options, *tests], fault)


class Run:
    """Tests that run in a process of their own."""

    def __init__(self, copy: Copy, cache: Path, changed: Path | None, arguments: Seq[str], fault: Fault | None) -> None:
        self._copy, self._changed, self.fault = copy, changed, fault
        self._told, self._begin = copy.tree.parent / "told.json", time.monotonic()
        self._told.unlink(missing_ok=True)
        self._kept = changed.read_bytes() if changed is not None else b""
        self._times = changed.stat().st_mtime_ns if changed is not None else 0
        if fault is not None and changed is not None:
            changed.write_text(changed.read_text().replace(fault.old, fault.new))
            os.utime(changed, ns=(1, 1))  # so that no compiled file fits it
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _as_child(lambda: _tested(copy, cache, changed, arguments, self._told), copy.log)

    def poll(self) -> Result | None:
        """The result; ``None`` as long as it runs."""
        seconds = time.monotonic() - self._begin
        pid, _ = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            if seconds < _LONGEST or self.fault is None:
                return None
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        if self._changed is not None:
            self._changed.write_bytes(self._kept)
            os.utime(self._changed, ns=(self._times, self._times))
        error = "its process ended" if pid else "it takes too long"
        record: dict[str, Any] = {"passed": [], "failed": [], "error": error}
        if self._told.exists():
            record = json.loads(self._told.read_text())
        if record["error"]:
            record["error"] += f":\n{self._copy.log.read_text(errors='replace')[-1000:]}"
        return Result(**record, seconds=seconds)

    def wait(self) -> Result:
        """The result, once it has ended."""
        while (result := self.poll()) is None:
            time.sleep(0.05)
        return result


def _as_child(work: Callable[[], None], log: Path) -> None:
    """Do `work` in a process that was forked, with its output in `log`, and end it."""
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()
    finally:
        os._exit(0)


class _Watch:
    """A plugin of pytest: the tests that passed or failed by themselves, and not for want of their fixtures."""

    def __init__(self) -> None:
        self.passed, self.failed = list[str](), list[str]()

    def pytest_sessionstart(self) -> None:
        """Turn shrinking off. A property that fails is enough."""
        settings.register_profile("unshrunk", settings(), phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("unshrunk")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            {"passed": self.passed, "failed": self.failed}.get(report.outcome, []).append(report.nodeid)


def _tested(copy: Copy, cache: Path, changed: Path | None, arguments: Seq[str], record: Path) -> None:
    """Run pytest in the copy, and tell how it went."""
    tree, sources = copy.tree, _sources(copy.tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:0] = sources
    sys.dont_write_bytecode = changed is not None
    os.chdir(tree)
    os.environ.pop("HYPOTHESIS_PROFILE", None)
    os.environ |= {"PYTHONPATH": os.pathsep.join(sources), "EMSSD_CACHE": str(cache), "PYTHONHASHSEED": "0"}
    libraries = set(cache.rglob("*.so"))
    watch = _Watch()
    code = pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "--hypothesis-seed", "0"], plugins=[watch])
    error = None
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        error = f"pytest ended with {code}"
    elif changed is None:
        pass
    elif changed.suffix != ".py":
        error = None if set(cache.rglob("*.so")) - libraries else "nothing was built"
    elif not any(getattr(module, "__file__", None) == str(changed) for module in [*sys.modules.values()]):
        error = f"nothing imported {changed}"
    record.write_text(json.dumps({"passed": watch.passed, "failed": watch.failed, "error": error}))


def _sources(tree: Path) -> list[str]:
    """The first part of a path to import from, so that the copy comes before the project."""
    return [str(tree), *sorted(str(path) for path in (tree / "plugins").iterdir() if path.is_dir())]
