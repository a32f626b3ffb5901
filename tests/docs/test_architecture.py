"""The page of the architecture: its reading path is short, and its picture and table have the rooms that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = {path.parent.name for path in (ROOT / "emssd").glob("*/__init__.py")}


def test_ten_files_tell_how_a_text_comes_about_in_2500_lines() -> None:
    path = re.findall(r"^\| \[`([\w/.]+\.py)`\]\(\.\./\1\) \|", PAGE, re.MULTILINE)
    assert len(path) == 10
    assert sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in path) <= 2500


def test_what_the_path_says_to_look_for_is_there() -> None:
    for name, words in re.findall(r"^\| \[`([\w/.]+\.py)`\]\(\S+\) \| (.*) \|$", PAGE, re.MULTILINE):
        text = (ROOT / name).read_text(encoding="utf-8")
        names = [part for words in re.findall(r"`([\w.]+)`", words) for part in words.split(".")]
        assert names
        assert not [each for each in names if not re.search(rf"\b(class|def) {each}\b|\b{each}:", text)], name


def test_the_table_names_each_room_once() -> None:
    table = PAGE.partition("## The rooms")[2].partition("`plugins/` has")[0]
    named = [
        room for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for room in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(named) == sorted(ROOMS)
