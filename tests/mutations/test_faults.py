"""The faults fit the code as it is; `nox -s mutations` plants them."""

from __future__ import annotations

from .fault import FAULTS, ROOT, as_markdown, function_of

NOTE = ROOT / "docs" / "decisions" / "0035-planted-faults.md"


def test_each_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_each_has_its_text_in_one_place_and_its_tests_are_there() -> None:
    for fault in FAULTS:
        fault.place()
        for test in fault.caught_by:
            file, *names = function_of(test).split("::")
            assert names[0] in (ROOT / file).read_text(encoding="utf-8"), f"{fault.name!r}: no {test}"


def test_the_note_has_the_table_of_python_m_tests_mutations_table() -> None:
    assert as_markdown() in NOTE.read_text(encoding="utf-8")
