"""The fastest method at each batch size follows from the rows, and the report says how sure it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emssd.report.cells import grids
from emssd.report.rows import Row, parse
from emssd.report.sections.methods import advice

from .conftest import value

PLAIN, ALWAYS, ADAPTIVE = (False, "fixed"), (True, "fixed"), (True, "adaptive")  # speculate, budget
RATES = {PLAIN: 100.0, ALWAYS: 150.0, ADAPTIVE: 90.0}


def cells(*lines: tuple[bool, str], batch_size: int = 8, repeats: int = 2, **rates: float) -> Iterator[dict[str, Any]]:
    """Rows of the lines; `rates` replace those of ``always`` and the like."""
    named = {"plain": PLAIN, "always": ALWAYS, "adaptive": ADAPTIVE}
    changed = RATES | {named[name]: rate for name, rate in rates.items()}
    for repeat in range(1, repeats + 1):
        for speculate, budget in lines:
            yield value(
                "crossover", None, repeat=repeat, batch_size=batch_size, speculate=speculate, budget=budget,
                budget_options=budget, metrics_decode_tokens_per_second=changed[speculate, budget],
            )  # fmt: skip


def advised(*rows: dict[str, Any]) -> list[list[str]]:
    """The lines of the table."""
    parsed = [each for row in rows if isinstance(each := parse(row), Row)]
    (grid,) = grids(parsed)
    return [list(line) for line in advice(grid).lines]


def test_plain_decoding_is_advised_where_nothing_is_faster() -> None:
    found = advised(*cells(PLAIN, ALWAYS, ADAPTIVE, always=80.0))
    assert found == [["8", "0.90 (0.90–0.90)", "plain greedy decoding"]]


def test_the_largest_speedup_is_advised() -> None:
    assert advised(*cells(PLAIN, ALWAYS, ADAPTIVE, adaptive=160.0)) == [
        ["8", "1.60 (1.60–1.60)", "llma, adaptive on padded"]
    ]


def test_advice_says_how_sure_it_is() -> None:
    assert advised(*cells(PLAIN, ALWAYS, repeats=1)) == [["8", "1.50", "llma, fixed on padded (one repeat)"]]
    mixed = [*cells(PLAIN, ALWAYS, repeats=3)]
    mixed[1]["metrics"]["decode_tokens_per_second"] = 90.0
    assert advised(*mixed) == [["8", "1.50 (0.90–1.50)", "llma, fixed on padded (too close to call)"]]


def test_with_nothing_but_plain_decoding_it_is_not_advised() -> None:
    found = advised(*cells(PLAIN, ALWAYS, batch_size=4), *cells(PLAIN, batch_size=8))
    assert found == [
        ["4", "1.50 (1.50–1.50)", "llma, fixed on padded"],
        ["8", "", "not known: nothing but plain greedy decoding was run"],
    ]
