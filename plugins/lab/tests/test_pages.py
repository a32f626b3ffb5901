"""The page of the results: complete, self-contained, and with its warnings."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from emssd_lab.report import figures
from emssd_lab.report.__main__ import main
from emssd_lab.report.rows import read
from emssd_lab.report.sections import origins, sections
from emssd_lab.report.sections.origins import mixtures

from .conftest import measured, value, write, write_run


class Page(NamedTuple):
    """A report on disk."""

    folder: Path
    markdown: str
    html: str


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of the results that are kept.

    One picture of each kind and mark is drawn, and stands for the others: each takes a quarter of a second.
    """
    folder, svg, pictures = tmp_path_factory.mktemp("page"), figures._svg, dict[object, str]()

    def drawn_once(figure: Any, axes: Any, mark: str) -> str:
        kind = (mark, bool(axes.lines))
        if kind not in pictures:
            pictures[kind] = svg(figure, axes, mark)
        return pictures[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_svg", drawn_once)
        main([str(ROOT / "benchmarks" / "results"), "--out", str(folder), "--title", "All <of> it"])
    return Page(folder, (folder / "report.md").read_text(), (folder / "report.html").read_text())


@pytest.mark.costly("all results")
def test_the_page_in_the_documentation_holds_what_the_results_say(page: Page) -> None:
    kept = (ROOT / "docs" / "results" / "paper" / "report.md").read_text(encoding="utf-8")
    parts = page.markdown.split("\n## ")[1:]
    assert len(parts) == 13
    for part in parts:
        assert part.strip() in kept


def test_the_html_is_well_formed_and_needs_nothing_else(page: Page) -> None:
    tree = ET.fromstring(page.html.removeprefix("<!DOCTYPE html>\n"))
    assert not list(tree.iter("script"))
    assert not list(tree.iter("link"))
    styles = "".join(style.text or "" for style in tree.iter("style"))
    assert "url(" not in styles
    assert "@import" not in styles
    for element in tree.iter():
        for name in ("src", "srcset", "data", "action"):
            assert element.get(name, "data:").startswith("data:")
        assert element.get("href", "#").startswith("#")
    images = list(tree.iter("img"))
    assert images
    for image in images:
        picture = ET.fromstring(base64.b64decode(image.get("src", "").removeprefix("data:image/svg+xml;base64,")))
        assert picture.tag.endswith("svg")
        links = {value for element in picture.iter() for name, value in element.attrib.items() if name.endswith("href")}
        assert all(link.startswith("#") for link in links)
        assert image.get("alt")


def test_the_markdown_has_its_plots_beside_it_and_none_is_large(page: Page) -> None:
    named = re.findall(r"!\[.*\]\((.*)\)", page.markdown)
    assert sorted(named) == sorted(path.name for path in page.folder.glob("*.svg"))
    assert max((page.folder / name).stat().st_size for name in named) < 150_000


def test_replay_and_random_weights_are_said_wherever_their_figures_are(page: Page) -> None:
    _, figure1, table2, *_ = page.markdown.split("\n## ")
    assert "replay" not in figure1
    *_, made_up = table2.split("\n### ")
    assert "(random weights, replay)" in made_up.partition("\n")[0]
    assert "acceptance drawn: p = 0.85" in made_up
    ((alt, plot),) = re.findall(r"!\[(.*)\]\((.*)\)", made_up)
    assert "random weights, replay" in alt
    assert "random weights, replay" in (page.folder / plot).read_text()  # above the legend


def test_rows_of_several_machines_or_commits_are_warned_of(tmp_path: Path) -> None:
    other = value()
    other["provenance"] = other["provenance"] | {"commit": "def5678"}
    other["provenance"]["hardware"] = other["provenance"]["hardware"] | {"device": "GPU"}
    write(tmp_path, [value(), other])
    found = mixtures(read([tmp_path]))
    assert [warning.split(" come from ")[1].split(":")[0] for warning in found] == [
        "several machines",
        "several commits",
    ]
    assert mixtures(read([write(tmp_path / "same", [value(), value(repeat=2)])])) == []


def test_runs_of_a_sweep_are_set_against_the_one_that_drafted_nothing_and_drawn(tmp_path: Path) -> None:
    speeds = {("none", 4): 10.0, ("llma", 4): 15.0, ("none", 8): 20.0, ("llma", 8): 18.0}
    for number, ((drafter, size), speed) in enumerate(speeds.items()):
        write_swept(tmp_path / str(number), drafter, size, ["backend=ragged"], decode_tokens_per_second=speed)
    write_swept(tmp_path / "4", "llma", 4, ["backend=ragged", "stop=['x']"], decode_tokens_per_second=99.0)
    main([str(tmp_path), "--out", str(tmp_path / "out"), "--name", "report"])
    text = (tmp_path / "out" / "report.md").read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| drafter=")]
    assert [line[0] for line in lines] == [f"| drafter={name}" for name in ("none", "llma", "none", "llma", "llma")]
    assert [line[3] for line in lines] == ["1.00×", "1.50×", "1.00×", "0.90×", ""]
    assert "All of demo:" in text
    picture = (tmp_path / "out" / "report_runs_0.svg").read_text()
    assert "llma adaptive" in picture
    assert "none" in picture
    assert not (tmp_path / "out" / "report_runs_1.svg").exists(), "a run alone is no picture"


def test_a_checked_run_shows_its_interval_and_a_long_title_ends_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = list[str]()
    monkeypatch.setattr(origins, "curves", lambda title, *_, **__: titles.append(title) or "")
    words = "backend=ragged data=text data.max_prompt_tokens=100 model.dtype=bfloat16 sampling.top_p=0.5"
    more = {"check": {"exact": 3, "ties": 1, "differences": 0}, "speedup": 1.25, "speedup_interval": [1.1, 1.4]}
    for size in (1, 2):
        write_swept(tmp_path / str(size), "llma", size, words.split(), **more)
    section = origins.plain_runs(read([tmp_path]).runs)
    assert "| 1.25× (1.10–1.40) | " in section.markdown()
    assert " | check | " in section.markdown()
    assert titles == ["backend=ragged, data=text, data.max_prompt_tokens=100, …"]


def test_a_busy_machine_is_told_where_its_times_are(tmp_path: Path, undrawn: None) -> None:
    rows = list(measured("my own", ("greedy", "vanilla")))
    rows[-1]["metrics"]["other_cpu_share"] = 0.34
    write(tmp_path / "busy", rows)
    write(tmp_path / "quiet", measured("fig1", ("greedy", "vanilla"), metrics_other_cpu_share=0.1))
    write_swept(tmp_path / "run", "llma", 4, [], greedy={"other_cpu_share": 0.5})
    warned = {
        section.title: re.findall(r"^> \*\*Warning\*\*: the machine was busy: .* used (\d+%)", section.markdown(), re.M)
        for section in sections(read([tmp_path]))
    }
    assert warned == {
        "Figure 1: speed-up by batch size": [],
        "Experiment my own": ["34%"],
        "Where the time of a step goes, and its floor": ["34%"],
        "Single runs": ["50%"],
        "Where this comes from": [],
    }


def write_swept(folder: Path, drafter: str, size: int, options: list[str], **more: object) -> None:
    setting = {"drafter": drafter, "budget": "adaptive", "batch_size": size, "options": options}
    write_run(folder, f"demo · drafter={drafter}", setting=setting, hardware={"cores": 2}, **more)
