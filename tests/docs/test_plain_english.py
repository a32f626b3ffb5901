"""The check of sentences finds each forbidden one, in docstrings, comments and pages, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._hooks.plain_english import CLEAN, ROOT, faults, files, main

SOURCE = '''"""Good words,
and what became of a draft.
"""


class Named:
    """Named, and whatever."""

    def ready(self):
        """Those that are ready."""
        return "what became of a text"  # told of a step


def plain():
    """Whatever was held

    to a rule."""
'''


def test_faults_are_found_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert sorted(faults(path)) == [
        (2, "'what became of'"),
        (10, "a docstring begins with 'Those'"),
        (11, "'told of'"),
        (15, "'held to'"),
    ]


def test_openings_without_a_subject(tmp_path: Path) -> None:
    openings = [(f"{word} it is.", word) for word in ("How", "Where", "Why", "When", "Who")]
    for text, word in openings:
        (path := tmp_path / "module.py").write_text(f'"""{text}"""\n')
        assert [*faults(path)] == [(1, f"a docstring begins with {word!r}")]
    path.write_text('"""Whether it is."""\n\n\ndef is_it():\n    """Whether it is."""\n')
    assert [*faults(path)] == [(1, "a docstring begins with 'Whether'")]
    (test := tmp_path / "tests").mkdir()
    (test / "module.py").write_text('"""How it is."""\n')
    assert not [*faults(test / "module.py")]


def test_a_sentence_may_go_on_in_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Title\n\nIt keeps those of it\nthat are right.\n")
    assert [*faults(path)] == [(3, "'those of it that'")]


def test_a_sentence_with_two_pronouns_and_a_line_that_begins_with_of_are_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# What others do\n\nSee [which](what.md). Whose is it?\n\n    what, which\n\n"
        "- It says what it is,\n  and which.\n\nOf `those` rows none stays.\n\n```\nOf what, of which\n```\n"
        "| which | what |\n| which is what | - |\n"
    )
    assert [*faults(path)] == [
        (7, "a sentence with 'what' and 'which'"),
        (16, "a sentence with 'which' and 'what'"),
        (10, "a line begins with 'Of'"),
    ]


@pytest.mark.costly("reads all files of the project")
def test_the_exit_status_says_whether_there_are_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
    assert all((ROOT / path).exists() for path in CLEAN)
    found = {str(path.relative_to(ROOT)) for path in files(ROOT / "docs")}
    assert "docs/exactness.md" in found
    assert "docs/reference/types.md" not in found
