"""Plants each fault, and demands that the tests of CI fail: `python -m tests.mutations`; `--help` lists the options."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from noxfile import CI as TESTS

from .fault import FAULTS, Fault, as_markdown, function_of
from .runner import Copy, Result, Run

_KINDS = ("gemma2", "gpt2", "llama", "mistral", "opt", "qwen2")
_LIBRARIES = ("accelerate", "hydra", "hypothesis.strategies", "rich.console", "torch", "transformers.modeling_utils")
_LIBRARIES += tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS)
CI = f"pretended or {TESTS}"  # what CI runs, in two sessions
_QUICKLY = ("-x", "-m", CI)


def main() -> int:
    """Returns the exit status: 1 if a fault survives, or could not be planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="faults whose name or room has one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--table", action="store_true", help="print the faults as Markdown, and plant none")
    options = parser.parse_args()
    if options.table:
        print(as_markdown())
        return 0
    words = options.only or [""]
    faults = [fault for fault in FAULTS if any(word in f"{fault.room}: {fault.name}" for word in words)]
    features = Path("/proc/cpuinfo").read_text().split()
    for fault in faults:
        if fault.needs and fault.needs not in features:
            print(f"left out, as this processor has no {fault.needs}: {fault.name}")
    faults = [fault for fault in faults if not fault.needs or fault.needs in features]
    begin = time.monotonic()
    with TemporaryDirectory(prefix="mutations") as folder:
        cache = Path(os.environ.get("EMSSD_CACHE") or Path(folder) / "cache")
        cache.mkdir(parents=True, exist_ok=True)
        copies = [Copy(Path(folder) / str(number), cache) for number in range(options.jobs)]
        _import_libraries()
        print(f"without faults: {len(faults)} of them are to be caught by tests that must pass now", flush=True)
        if wrong := _why_not_green(faults, copies):
            print(wrong)
            return 1
        survivors = [fault.name for fault, result in _results(faults, copies) if _survives(fault, result)]
    caught = len(faults) - len(survivors)
    print(f"{caught} of {len(faults)} faults were caught, in {time.monotonic() - begin:.0f} s")
    for name in survivors:
        print(f"SURVIVES: {name}")
    return int(bool(survivors))


def _import_libraries() -> None:
    """Prepare what most runs need, once; nothing of the project, which each run imports from its own copy."""
    for name in _LIBRARIES:
        import_module(name)
    import_module("torch").set_num_threads(1)
    assert "emssd" not in sys.modules, "a fork would not import its own copy"


def _why_not_green(faults: Seq[Fault], copies: Seq[Copy]) -> str | None:
    """Run all tests once without a fault; what is wrong with them, in words."""
    tests = sorted({test for fault in faults for test in fault.caught_by})
    files = sorted({test.partition("::")[0] for test in tests})
    running = [
        copy.start([test for test in tests if test.partition("::")[0] in files[turn :: len(copies)]], _QUICKLY[1:])
        for turn, copy in enumerate(copies[: len(files)])
    ]
    passed = set[str]()
    for run in running:
        result = run.wait()
        if result.error or result.failed:
            return f"without a fault: {result.error or ', '.join(result.failed)}"
        passed.update(result.passed, map(function_of, result.passed))
    missing = [test for test in tests if test not in passed]
    return f"no tests of CI, or skipped: {', '.join(missing)}" if missing else None


def _results(faults: Seq[Fault], copies: Seq[Copy]) -> Iterator[tuple[Fault, Result]]:
    """Plant all faults, as many at a time as there are copies; they come as they end."""
    waiting, idle, running = list(faults), list(copies), dict[Copy, Run]()
    while waiting or running:
        while waiting and idle:
            fault, copy = waiting.pop(0), idle.pop(0)
            try:
                running[copy] = copy.start(fault.caught_by, _QUICKLY, fault)
            except LookupError as error:
                idle.append(copy)
                yield fault, Result([], [], str(error), 0.0)
        for copy, run in list(running.items()):
            if (result := run.poll()) is not None and run.fault is not None:
                del running[copy]
                idle.append(copy)
                yield run.fault, result
        time.sleep(0.05)


def _survives(fault: Fault, result: Result) -> bool:
    """Print what became of a fault; returns whether it survived."""
    reason = result.error or ", ".join(result.failed) or "SURVIVES"
    print(f"{result.seconds:5.1f} s  {fault.room}: {fault.name}\n         {reason}", flush=True)
    return result.error is not None or not result.failed


if __name__ == "__main__":
    sys.exit(main())
