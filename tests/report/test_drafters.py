"""Drafters side by side: every ratio is to plain greedy decoding of the same text, and the verdict follows."""

from __future__ import annotations

import re
from pathlib import Path

from emssd.report.tables import Table

from .conftest import section_of, value, write

RATES = {"none": 100.0, "llma": 150.0, "pld": 140.0, "rest(store=a|b)": 90.0}


def test_each_drafter_is_set_against_plain_decoding_of_its_text(tmp_path: Path) -> None:
    rows = []
    for repeat in (1, 2, 3):
        for text, factor in (("news", 1.0), ("math", 2.0)):
            for name, rate in RATES.items():
                spread = 1.0 + 0.05 * (repeat - 2) * (name == "pld")
                row = value(
                    "drafters", None, repeat=repeat, speculate=name != "none", drafter=name.partition("(")[0],
                    drafter_options=name, data_label=text, backend="ragged", backend_options="ragged",
                    metrics_decode_tokens_per_second=rate * factor * spread,
                )  # fmt: skip
                rows.append(row)
    write(tmp_path, rows)
    section = section_of(tmp_path, "drafters")
    assert section is not None
    speeds, shares = (block for block in section.blocks if isinstance(block, Table))
    assert speeds.columns == ["drafter", *(f"{text}, 6 prompts, 64 new tokens" for text in ("news", "math"))]
    assert speeds.lines == [
        ["llma", *["1.50 (1.50–1.50)"] * 2],
        ["pld", *["1.40 (1.33–1.47)"] * 2],
        ["rest(store=a|b)", *["0.90 (0.90–0.90)"] * 2],
    ]
    assert shares.lines == [  # of 20 row-steps 16 drafted 4 tokens, and 10 accepted 2
        [name, "2.00 (31%)", "2.00 (31%)"] for name in ("llma", "pld", "rest(store=a|b)")
    ]


def test_a_drafter_without_plain_decoding_of_its_text_has_no_speedup(tmp_path: Path) -> None:
    write(tmp_path, [value("drafters", None, drafter="llma", drafter_options="llma")])
    section = section_of(tmp_path, "drafters")
    assert section is not None
    speeds, _ = (block for block in section.blocks if isinstance(block, Table))
    assert speeds.lines == [["llma", "no baseline"]]


def test_drafters_of_other_budgets_and_backends_have_tables_of_their_own(tmp_path: Path) -> None:
    lines = [("ragged", "fixed", 120.0), ("ragged", "adaptive", 130.0), ("padded", "fixed", 140.0)]
    rows = [
        value("drafters", None, speculate=name != "none", drafter=name, drafter_options=name, backend_options=backend,
              budget_options=budget, metrics_decode_tokens_per_second=rate if name == "llma" else 100.0)
        for backend, budget, rate in lines
        for name in ("none", "llma")
    ]  # fmt: skip
    write(tmp_path, rows)
    section = section_of(tmp_path, "drafters")
    assert section is not None
    shown = dict(re.findall(r"### .* · batch size 2 · (.*)\n\n.*\n\n.*\n.*\n\| llma \| ([\d.]+)", section.markdown()))
    assert shown == {"fixed on ragged": "1.20", "adaptive on ragged": "1.30", "fixed on padded": "1.40"}


def test_there_is_no_section_without_rows(tmp_path: Path) -> None:
    write(tmp_path, [value("fig1", "greedy")])
    assert section_of(tmp_path, "drafters") is None
