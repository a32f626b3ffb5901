"""What is typed at the command line by chance or mistake: a sentence on stderr and status 2."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import drafter

SENTENCES = {
    "stop=hello": "stop is 'hello'; it must be a list, as in stop=[hello]",
    "stop=3": "stop is 3; it must be a list, as in [a,b]",
    "stop=[[1]]": "stop[0] is [1]; it must be text",
    "stop=[null]": "stop[0] is null; it must be text",
    "batch_size=four": "batch_size is 'four'; it must be an integer",
    "batch_size=2.5": "batch_size is 2.5; it must be an integer",
    "batch_size=true": "batch_size is true; it must be an integer",
    "batch_size=null": "batch_size is null; it must be an integer",
    "batch_size.x=3": "batch_size is {}; it must be an integer",
    "batch_size=1" + "0" * 30: "batch_size is a number of 31 digits; it must be below 2^63",
    "batch_size=" + "9" * 5000: "Exceeds the limit (4300 digits) for integer string conversion",
    "batch_size=1,2": "batch_size=1,2 has commas; batch_size=[1,2] is a list, 'batch_size=\"1,2\"' one text, and with ",
    "batch_size=range(1,3)": "batch_size=range(1,3) is a sweep; write -m before all options",
    "batch_size=cast(3)": "'batch_size=cast(3)' is not in Hydra's syntax (Unknown function 'cast'; Available: bool,",
    "batch_size=${nope}": "batch_size refers to what cannot be found: Interpolation key 'nope' not found; where a ",
    "batch_size=${oc.env:HOME}": "batch_size is '/home/somebody'; it must be an integer (while dereferencing ",
    "output_dir=${output_dir}": "output_dir refers to what cannot be found: Recursive interpolation detected; ",
    "num_threads=x": "num_threads is 'x'; it must be an integer, or null",
    "repeat=0": "repeat is 0; it must be at least 1",
    "max_step_tokens=-1": "max_step_tokens is -1; it must be at least 1",
    "data.max_prompt_tokens=-1": "data.max_prompt_tokens is -1; it must be at least 1",
    "drafter=replay drafter.seed=-1 model=toy_shape data=random": "drafter.seed is -1; it must be at least 0",
    "progress=maybe": "progress is 'maybe'; it must be true or false",
    "model.compile=-5": "model.compile is -5; it must be true or false",
    "model.compile=2.5": "model.compile is 2.5; it must be true or false",
    "check=twice": "check is 'twice'; it must be greedy, or null",
    "budget.memory=nan": "budget.memory is nan; it must be a finite number",
    "budget.memory=-inf": "budget.memory is -inf; it must be a finite number",
    "model.architecture={a:[1,{b:nan}]}": "model.architecture.a[1].b is nan; it must be a finite number",
    "task={a:1}": "task={a:1} is no choice; write task=NAME, with one of cnn_dailymail, demo, ",
    "drafter=[llma,none]": "drafter=[llma,none] is no choice; write drafter=NAME, with one of cascade, ",
    "model=org/name": "unknown model preset 'org/name'; presets are demo, demo_draft, ",
    "++data.name=jsonl": "data.name cannot be set by itself; choose with data=NAME, one of demo, hf, jsonl, ",
    "prompts.jsonl": "'prompts.jsonl' is no option; to decode the prompts of this file write data=jsonl data.pa",
    "notes/prompts.txt": "'notes/prompts.txt' is no option; to decode the prompts of this file write data=text data",
    "hello": "'hello' is no option, as in NAME=VALUE; to decode this text write prompt=hello, to decode the prompts of",
    "${nope}": "'${nope}' is no option, as in NAME=VALUE; to decode this text write prompt='${nope}', ",
    "hydra=4": "Config group override must be a string or a list. Got int",
    "--resolve": "The --resolve flag can only be used in conjunction with --cfg or --help",
    "prompt=hi data=jsonl data.path=x": "prompt= is decoded in the place of data; leave data= out, or prompt=",
    "prompt=hi data.limit=3": "prompt= is decoded in the place of data; leave data.limit= out, or prompt=",
    "prompt=hi experiment=fig1 size=toy": "an experiment decodes the data of its task; leave prompt= or exper",
    "data=text data.path=- -m": "a sweep reads its prompts once for each run, and data.path=- is there only once",
    "data=text data.path=- resume=true output_dir=out": "resume=true reads the prompts of a job again, and ",
}  # fmt: skip


@pytest.mark.parametrize("given", SENTENCES, ids=lambda given: given[:40])
def test_what_cannot_be_is_told_in_a_sentence(given: str, emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert emssd(*given.split(" ")).sentence.startswith(SENTENCES[given])


def test_a_value_with_signs_of_its_own_is_given_back_in_quotes(emssd: Callable) -> None:
    sentence = emssd("data=jsonl", "data.path=x", "data.template=a: {b}").sentence
    assert sentence.startswith(
        "'data.template=a: {b}' is not in Hydra's syntax; a text with signs of its own wants quotes"
    )
    (quoted,) = shlex.split(sentence.partition("quotes: ")[2])
    assert emssd("data=jsonl", "data.path=x", quoted).sentence == f"data.path=x: no such file (looked in {Path.cwd()})"


def test_an_option_that_one_of_the_swept_choices_lacks_names_the_choice(emssd: Callable) -> None:
    options = ("drafter=llma_original,pld", "drafter.num_speculative_tokens=2", "data.limit=1", "max_new_tokens=2")
    sentence = emssd("-m", *options, "output_dir=out", "progress=false").sentence
    assert sentence.startswith(
        "drafter 'llma' has no option 'num_speculative_tokens'. It has match_length, copy_length"
    )


@pytest.mark.parametrize(
    ("options", "set_to", "wrong"),
    [
        ("scale: float = float('nan')", "drafter=third", "drafter.scale is nan; it must be a finite number"),
        ("scale: float = 1.0", "drafter.scale=inf", "drafter.scale is inf; it must be a finite number"),
        ("flag: bool = False", "drafter.flag=7", "drafter.flag is 7; it must be true or false"),
        (
            "names: list[str] = field(default_factory=list)",
            "drafter.names=[[a]]",
            "drafter.names[0] is [a]; it must be text",
        ),
        (
            "sizes: dict[str, int] = field(default_factory=dict)",
            "drafter.sizes.a=x",
            "drafter.sizes.a is 'x'; it must be ",
        ),
    ],
)
def test_the_options_of_a_strangers_plugin_are_held_to_the_same(
    options: str, set_to: str, wrong: str, install: Callable, emssd: Callable
) -> None:
    install("third", drafter(options=options))
    assert emssd("drafter=third", set_to).sentence.startswith(wrong)


def test_a_strangers_preset_is_held_to_the_same(emssd: Callable, work: Path) -> None:
    preset = work / "presets" / "budget" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("defaults: [adaptive]\nmemory: .inf\n")
    options = ("--config-dir", "presets", "budget=mine")
    assert emssd(*options).sentence == "budget.memory is inf; it must be a finite number"
    preset.write_text("defaults: [adaptive]\nmemory: long\n")
    assert emssd(*options).sentence.startswith(
        "In 'budget/mine': ValidationError raised while composing config: Value 'lo"
    )
