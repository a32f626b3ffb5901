"""The page that all kinds of rows make: complete, self-contained, and saying what it has to say."""

from __future__ import annotations

import base64
import json
import re
import shlex
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

from emssd.report.__main__ import main
from emssd.report.page import html_page
from emssd.report.sections import sections
from emssd.report.sections.crossover import command_for
from emssd.report.sections.provenance import mixtures
from emssd.report.sources import read
from emssd.report.text import code, escape, table

from .conftest import measured, row, value, write


@dataclass(frozen=True)
class Page:
    """A report on disk."""

    folder: Path
    markdown: str
    html: str

    @property
    def tree(self) -> ET.Element:
        """The page, parsed strictly."""
        return ET.fromstring(self.html.removeprefix("<!DOCTYPE html>\n"))


@pytest.fixture(scope="module")
def page(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("page")
    runs = [str(everything), str(everything / "peers.json")]
    main([*runs, "--out", str(folder), "--name", "all", "--title", "All <of> it"])
    return Page(folder, (folder / "all.md").read_text(), (folder / "all.html").read_text())


def test_the_html_is_well_formed_and_needs_nothing_else(page: Page) -> None:
    tree = page.tree
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


def test_links_lead_to_sections(page: Page) -> None:
    ids = {element.get("id") for element in page.tree.iter("h2")}
    assert {(element.get("href") or "").removeprefix("#") for element in page.tree.iter("a")} == ids


def test_the_markdown_has_its_plots_beside_it_and_none_is_large(page: Page) -> None:
    named = re.findall(r"!\[.*\]\((.*)\)", page.markdown)
    assert sorted(named) == sorted(path.name for path in page.folder.glob("*.svg"))
    assert max((page.folder / name).stat().st_size for name in named) < 150_000


def test_every_kind_of_rows_has_its_section(page: Page) -> None:
    titles = re.findall(r"^## (.*)$", page.markdown, flags=re.MULTILINE)
    starts = [
        "Figure 1", "Table 2", "Table 3", "Table 4", "Appendix: several datasets", "Padding of the vanilla",
        "Acceptance by", "Time of a step", "Appendix: expected padding", "Crossover", "Drafters side by side",
        "Experiment my own",
        "Where the time", "Tokens per second", "Beside other engines", "Single runs", "Where this comes from",
    ]  # fmt: skip
    assert len(titles) == len(starts)
    assert all(title.startswith(start) for title, start in zip(titles, starts, strict=True))


def test_a_section_without_rows_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, measured("my own", ("greedy", "vanilla")))
    titles = [section.title for section in sections(read([tmp_path]))]
    assert titles == ["Experiment my own", "Where the time of a step goes", "Tokens per second against the floor",
                      "Where this comes from"]  # fmt: skip


def test_replay_and_random_weights_are_said_wherever_their_figures_are(page: Page) -> None:
    fig1 = page.markdown.split("\n## ")[1]
    heading = next(line for line in fig1.splitlines() if line.startswith("### "))
    assert "(random weights, replay)" in heading
    assert "acceptance drawn: p = 0.75" in fig1
    images = re.findall(r"!\[(.*)\]\(.*\)", fig1)
    assert images
    assert all("random weights, replay" in alt for alt in images)
    caption = fig1.split("![")[1].splitlines()[2]
    assert "random weights, replay" in caption
    others = page.markdown.split("\n## ")[2]
    assert "replay" not in others


def test_text_from_rows_is_shown_as_it_is(page: Page) -> None:
    text = "".join(page.tree.itertext())
    assert "All <of> it" in text
    assert "made up | for tests, 2 threads" in text  # the processor's name, which stands in a table, too
    assert "failed: no | memory" in text
    cells = {len(line.findall("th")) + len(line.findall("td")) for line in page.tree.iter("tr")}
    for made in page.tree.iter("table"):
        widths = {len(list(line)) for line in made.iter("tr")}
        assert len(widths) == 1, widths
    assert 0 not in cells


def test_the_verdict_follows_from_the_figures(tmp_path: Path) -> None:
    rates = {"greedy": 100, "vanilla": 110, "unpad_kv": 150, "unpad_inputs": 120, "unpad_both": 180}

    def rows(inputs: float) -> list[dict[str, object]]:
        return [
            value("ablation", name, repeat=repeat, batch_size=8, metrics_decode_tokens_per_second=rate * repeat)
            for repeat in (1, 2, 3)
            for name, rate in (rates | {"unpad_inputs": inputs}).items()
        ]

    write(tmp_path, rows(120))
    said = _text(tmp_path)
    assert "at batch size 8 unpadding the KV cache matters more, beyond the spread" in said
    assert "at batch size 8 the paper's table is not borne out" in said
    assert "text is not borne out" not in said
    write(tmp_path, rows(160))
    said = _text(tmp_path)
    assert "at batch size 8 unpadding the inputs matters more, beyond the spread" in said
    assert "at batch size 8 the paper's text is not borne out" in said
    write(tmp_path, rows(150))
    assert "do not settle it" in _text(tmp_path)


def test_a_cell_without_its_baseline_is_shown_and_named(tmp_path: Path) -> None:
    write(tmp_path, [value("fig1", "vanilla", metrics_decode_tokens_per_second=321.0)])
    said = _text(tmp_path)
    assert "| 2 | vanilla | 321 |  |" in said
    assert "vanilla at batch size 2: no baseline" in said


def test_steps_are_timed_by_tokens_per_sample(page: Page) -> None:
    section = next(part for part in page.markdown.split("\n## ") if part.startswith("Time of a step"))
    assert "| batch 16 | 17.20 (17.10–17.30) | 19.20 (19.10–19.30) | 21.20 (21.10–21.30) |" in section
    ratio = "a step of 5 tokens per row is 1.23 (1.23–1.23) times as long as one of 1 (the paper: 1.36)"
    assert f"Batch size 16: {ratio}" in section


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


def test_datasets_stand_beside_the_papers_figures_of_their_own_data(tmp_path: Path) -> None:
    names = ("spec_math", "spec_mt_bench", "spec_summarization", "other")
    write(tmp_path, [row for name in names for row in measured("datasets", ("greedy", "vanilla"), data_label=name)])
    section = sections(read([tmp_path]))[0]
    captions = [block[1] for block in section.blocks if not isinstance(block, str)]
    theirs = [caption.partition("OPT-13b on ")[2] for caption in captions]
    assert theirs == ["GSM8K.", "MT-Bench.", "CNN/Daily Mail.", "CNN/Daily Mail."]


def test_the_advised_command_is_the_sweeps_without_the_sweep() -> None:
    overrides = ["model=demo", "data=text", "data.path=my file.txt", "drafter=llma", "drafter.copy_length=3",
                 "repeat=2", "experiment=crossover", "method=always", "batch_size=8", "output_dir=x"]  # fmt: skip
    mine = row("crossover", None, batch_size=8, overrides=overrides)
    assert shlex.split(command_for(mine)) == [
        "python", "-m", "emssd", "model=demo", "data=text", "data.path=my file.txt", "drafter=llma",
        "drafter.copy_length=3", "budget=fixed", "batch_size=8",
    ]  # fmt: skip
    greedy = shlex.split(command_for(mine, speculate=False))
    assert greedy == ["python", "-m", "emssd", "model=demo", "data=text", "data.path=my file.txt", "drafter=none",
                      "batch_size=8"]  # fmt: skip


@pytest.mark.parametrize("text", ["a|b", "`x`", "``", "*a*", "<b>&amp;", "[x](http://y)", "a\\|b", "$x$"])
def test_text_comes_through_markdown_unchanged(text: str) -> None:
    page = html_page("t", table(["escaped", "code"], [[escape(text), code(text)]]), {})
    cells = list(ET.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter("td"))
    assert ["".join(cell.itertext()) for cell in cells] == [text, text]


def test_alternative_text_is_shown_without_markdowns_backslashes() -> None:
    text = "a|b `*x*` <c> [d](e) $f$"
    page = html_page("t", f"![{escape(text)}](p.svg)", {"p.svg": "<svg/>"})
    (image,) = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter("img")
    assert image.get("alt") == text


def test_what_a_later_experiment_adds_to_a_setting_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "fig1", measured("fig1", ("greedy", "vanilla")))
    write(tmp_path / "ablation", measured("ablation", ("greedy", "vanilla", "unpad_kv")))
    _, _, text = _text(tmp_path).partition("The paper gives no times")
    phases, _, floors = text.partition("The paper gives no floor")
    for part in (phases, floors):
        first, _, second = part.partition("### ablation: ")
        assert first.count("| 8 | vanilla |") == 1
        assert "unpad KV" not in first
        assert second.count("| 8 | unpad KV |") == 1
        assert "| 8 | vanilla |" not in second


def _text(folder: Path) -> str:
    found = sections(read([folder]))
    return "\n".join(block for section in found for block in section.blocks if isinstance(block, str))


def test_peers_are_judged_by_their_spread(page: Page) -> None:
    section = next(part for part in page.markdown.split("\n## ") if part.startswith("Beside other engines"))
    assert "greedy: emssd ÷ vllm at 4: 1.50 (ahead); vllm at 8: 1.50 (ahead)." in section
    assert "| 8 | ngram | vllm | 168 (160–176) | 1.50 | 4/4 | 3/4 |" in section


def test_single_runs_are_listed(page: Page, everything: Path) -> None:
    section = next(part for part in page.markdown.split("\n## ") if part.startswith("Single runs"))
    assert "1.25 | 1.50 | 4 exact, 1 ties, 0 different" in section
    assert json.dumps(str(everything / "runs" / "0"))[1:-1] in section


def test_runs_of_a_sweep_are_set_against_the_one_that_drafted_nothing_and_drawn(tmp_path: Path) -> None:
    speeds = {("none", 4): 10.0, ("llma", 4): 15.0, ("none", 8): 20.0, ("llma", 8): 18.0}
    for number, ((drafter, size), speed) in enumerate(speeds.items()):
        setting = {"drafter": drafter, "budget": "adaptive", "batch_size": size, "options": ["backend=ragged"]}
        write_run(tmp_path / str(number), setting, speed)
    alone = {"drafter": "llma", "budget": "adaptive", "batch_size": 4, "options": ["backend=ragged", "stop=['x']"]}
    write_run(tmp_path / "4", alone, 99.0)
    main([str(tmp_path), "--out", str(tmp_path / "out"), "--name", "report"])
    text = (tmp_path / "out" / "report.md").read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| demo ")]
    assert [line[3] for line in lines] == ["1.00", "1.50", "1.00", "0.90", ""]
    picture = (tmp_path / "out" / "report_runs_1.svg").read_text()
    assert "llma adaptive" in picture
    assert "none" in picture
    assert not (tmp_path / "out" / "report_runs_2.svg").exists(), "a run alone is no picture"


def write_run(folder: Path, setting: dict[str, object], speed: float) -> None:
    folder.mkdir()
    metrics = {"title": f"demo · drafter={setting['drafter']}", "setting": setting, "hardware": {"cores": 2}}
    metrics |= {"tokens_per_second": speed, "decode_tokens_per_second": speed}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"mean_acceptance_length": 1.0, "num_new_tokens": 5}))


def test_a_command_in_a_table_wraps_on_a_narrow_screen_and_figures_do_not() -> None:
    page = html_page("t", table(["command", "speed"], [[code("python -m emssd drafter=llma batch_size=4"), "1.0"]]), {})
    assert '<td style="text-align:left" class="wide"><code>python' in page
    assert '<td style="text-align:right">1.0' in page
