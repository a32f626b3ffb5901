"""The files, functions and calls of one decode step of two rows of the demo.

    python benchmarks/step_calls.py
    python benchmarks/step_calls.py --calls suffix

Counted are Python functions of emssd and its plugins, comprehensions included.
`--calls` lists them for one drafter, with how often each is called.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from rich.console import Console
from rich.table import Table

from emssd import Engine
from emssd.sequences import Request

PROMPTS = (
    "Question: Tom has 12 apples and buys 3 more. How many apples does Tom have?\nAnswer:",
    "Question: A box holds 6 pens. How many pens do 4 boxes hold?\nAnswer:",
)
ROOT, WARM_UP, NEW_TOKENS = Path(__file__).resolve().parents[1], 6, 60


def calls_of_a_step(drafter: str, budget: str = "fixed") -> Counter[CodeType]:
    """The number of calls of each function in a step that drafts for both rows."""
    engine = Engine.from_pretrained("demo", drafter=drafter, budget=budget, batch_size=2, compile=False)
    for name, prompt in enumerate(PROMPTS):
        engine.add(Request(str(name), tuple(engine.tokenizer(prompt)["input_ids"]), NEW_TOKENS))
    for _ in range(WARM_UP):
        engine.step()
    calls = Counter[CodeType]()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(str(ROOT)) and "site-packages" not in code.co_filename
        if event == "call" and ours:
            calls[code] += 1

    while True:
        calls.clear()
        num_row_steps = engine.report.decode.num_row_steps
        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        assert engine.report.decode.num_row_steps == num_row_steps + len(PROMPTS), "a row ended before both had a draft"
        if all(engine.drafting.stats[0].drafted):
            return calls


def num_files(calls: Counter[CodeType]) -> int:
    """The files that hold the functions."""
    return len({code.co_filename for code in calls})


def num_statements() -> int:
    """Statements of `Engine.step`, its docstring left out."""
    function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(Engine.step)))).body[0]
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 2


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["suffix", "eagle3"])
    parser.add_argument("--budget", default="fixed")
    parser.add_argument("--calls", metavar="DRAFTER")
    options = parser.parse_args()
    console = Console()
    if options.calls:
        for code, number in calls_of_a_step(options.calls, options.budget).most_common():
            path = Path(code.co_filename).relative_to(ROOT)
            console.print(f"{number:5} {path}:{code.co_firstlineno} {code.co_qualname}")
        return
    table = Table("drafter", "files", "functions", "calls", title=f"Engine.step has {num_statements()} statements")
    for drafter in options.drafters:
        calls = calls_of_a_step(drafter, options.budget)
        table.add_row(drafter, *map(str, (num_files(calls), len(calls), calls.total())))
    console.print(table)


if __name__ == "__main__":
    main()
