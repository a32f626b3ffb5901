"""The faults fit the code as it is; `nox -s mutations` plants them."""

from __future__ import annotations

import pytest

from .fault import ROOT, Fault
from .table import FAULTS, as_markdown

NOTE = ROOT / "docs" / "decisions" / "0035-planted-faults.md"


def test_each_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_text_is_there_once_and_its_tests_are_there(fault: Fault) -> None:
    assert fault.place().read_text().replace(fault.old, fault.new).count(fault.old) == fault.new.count(fault.old)
    for test in fault.caught_by:
        file, *names = test.partition("[")[0].split("::")
        assert f"def {names[-1]}(" in (ROOT / file).read_text()


def test_the_note_has_the_table_of_python_m_tests_mutations_table() -> None:
    assert as_markdown() in NOTE.read_text(encoding="utf-8")
