"""Mistakes of users: one sentence on stderr, exit status 2, no traceback, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiers import looped

from .conftest import assert_said, drafter

HYDRAS_OWN = {  # what matters in Hydra's words: the option or value that was given, and what to do
    "stop=hello": ("stop: ", "str is not a ListConfig, list"),
    "stop=[null]": ("stop[0]: ", "NoneType is not a subclass of str"),
    "batch_size=four": ("batch_size: ", "'four'", "Integer"),
    "batch_size=null": ("batch_size: ", "is not Optional"),
    "batch_size=1,2": ("'batch_size=1,2'", "list, use key=[value1,value2]", "string, quote", "sweep", "--multirun"),
    "batch_size=cast(3)": (
        "'batch_size=cast(3)'",
        "Hydra's syntax",
        "Unknown function 'cast' Available: bool,",
        "put the value in quotes",
    ),
    "batch_size=${nope}": ("batch_size: ", "'nope' not found"),
    "output_dir=${output_dir}": ("output_dir: ", "Recursive interpolation"),
    "model.compile=2.5": ("model.compile: ", "'2.5' of type 'float' is incompatible"),
    "check=twice": ("check: ", "'twice', expected one of [greedy, plain]"),
    "task={a:1}": ("these options cannot be", "AttributeError"),
    "drafter=[llma,none]": ("drafter/none", "NoneConfig is not a subclass of LLMAConfig"),
    "model=org/name": ("unknown model 'org/name'", "choose one of demo, ", "write model.path=org/name"),
    "prompts.jsonl": ("'prompts.jsonl' is no option", "data=jsonl data.path=prompts.jsonl"),
    "notes/prompts.txt": ("'notes/prompts.txt' is no option", "data=text data.path=notes/prompts.txt"),
    "hello": ("'hello' is no option, as in NAME=VALUE", "prompt=hello", "--help"),
    "${nope}": ("'${nope}' is no option, as in NAME=VALUE", "prompt='${nope}'"),
    "hydra=4": ("Config group override must be a string",),
    "--resolve": ("--resolve flag can only be used",),
    "batch_size=" + "9" * 5000: ("Exceeds the limit (4300 digits) for integer string conversion",),
}

SHAPE = "model=hf model.path=shape data=random drafter=none +model.architecture.model_type=llama"
SENTENCES = {
    "stop=['']": "stop holds ''; every stop string is a text of at least one character",
    "resume=true overwrite=true output_dir=out":
        "resume=true keeps the rows of the output folder, overwrite=true drops them; choose one",
    "resume=true": "resume=true goes on with the job of a folder; say which, with output_dir=FOLDER",
    "batch_size=1" + "0" * 30: "batch_size is a number of 31 digits; it must be below 2^63",
    "model.compile=maybe": "model.compile is maybe; it must be true, false or auto",
    "++data.name=jsonl": "data.name cannot be set by itself; choose with data=NAME, one of demo, hf, jsonl, …",
    "prompt=hi data=jsonl data.path=x": "prompt= is decoded in the place of data; leave data= and data.limit= out, …",
    "prompt=hi data.limit=3": "prompt= is decoded in the place of data; leave data= and data.limit= out, …",
    "prompt=hi experiment=fig1 size=toy": "an experiment decodes the data of its task; leave prompt= or exper…",
    "data=text data.path=- -m": "a sweep reads its prompts once for each run, and data.path=- is there only once…",
    "data=text data.path=- resume=true output_dir=out": "resume=true reads the prompts of a job again, and …",
    "data.limit=0": "data.limit is 0; it must be at least 1",
    "~drafter": "drafter is not given and has no default; add drafter=VALUE",
    "data.limt=2": "data 'demo' has no option 'limt'; did you mean 'limit'? It has limit, truncate, …",
    "drafter.lenght=3": "drafter 'suffix' has no option 'lenght'. It has num_speculative_tokens, …",
    "model.dtpe=float32": "model has no option 'dtpe'; did you mean 'dtype'? It has path, gguf_file, dtype, device, …",
    "batchsize=4": "there is no option 'batchsize'; did you mean 'batch_size'? python -m emssd --help lists all",
    "zzz.like=it": "there is no option 'zzz'. python -m emssd --help lists all",
    "drafter.search=prompt":
        "drafter 'suffix' has no option 'search', which belongs to drafter=llma. It has num_speculative_tokens, …",
    "backend.kernels=fast": "backend.kernels: Invalid value 'fast', expected one of [auto, fused, torch]; …",
    "backend.kernels=fused backend.page_size=8":
        "backend 'ragged' cannot serve this model: the fused kernel has pages of 16 tokens, …",
    "model=opt_66b":
        "unknown model 'opt_66b'; did you mean 'opt_6_7b'? choose one of demo, demo_draft, hf, …",
    f"{SHAPE} ++model.architecture.hidden_size=abc": "model.architecture makes no model of type 'llama': Validation "
        "error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, …",
    f"{SHAPE} ++model.architecture.hidden_size=66": "model.architecture makes no model of type 'llama': Class "
        "validation error for validator 'validate_architecture': ValueError: The hidden size…",
    f"{SHAPE} ++model.architecture.model_type=optt":
        "model.architecture makes no model of type 'optt': Unrecognized model identifier: optt. …",
    f"{SHAPE} ++model.architecture.hidden_sze=64":
        "model.architecture of type 'llama' has no value 'hidden_sze'; did you mean 'hidden_size'?",
    "sampling.n=2":
        "sampling.n is 2 at temperature 0, which would give 2 equal texts; raise temperature, or leave n out",
    "sampling.logprobs=100000": "sampling.logprobs is 100000, but the model's vocabulary has…",
    "sampling.temperature=-1": "sampling.temperature is -1.0; it must be 0 or at least 1e-06",
    "sampling.top_q=1": "sampling has no option 'top_q'; did you mean 'top_p'?…",
    "sampling.top_k=many": "sampling.top_k…",
    "sampling.method=residul": "sampling.method: Invalid value 'residul', expected one of [coupled, residual]…",
    "sampling.logit_bias={-4:2}": "sampling.logit_bias has a token id -4; it must be a whole number of at least 0…",
    "--batch-size 4": "there is no --batch-size; options are written NAME=VALUE, here perhaps batch_size=4;…",
    "--batch_size=4 -m": "there is no --batch_size; options are written NAME=VALUE, here perhaps batch_size=4;…",
    "progress=false --ignore-eos": "there is no --ignore-eos; options are written NAME=VALUE, here perhaps ign…",
    "output_dir=s3://b/x": "output_dir is the address s3://b/x, and rows go to a folder of this machine; give its path",
    f"output_dir={'x' * 256}": "cannot write to output_dir=xxx…: File name too long; set output_dir to …",
    f"output_dir={'d/' * 2000}": "cannot write to output_dir=d/d/d… too many folders in folders; set output_dir to …",
    **{
        f"output_dir=- {given}":
            f"output_dir=- writes the rows of one run to stdout, and no file, which {name} needs; set output_dir to a "
            f"folder"
        for given, name in (("resume=true", "resume=true"), ("overwrite=true", "overwrite=true"),
                            ("-m batch_size=1,2", "a sweep"),
                            ("data=openai_batch data.path=x", "data=openai_batch"))
    },
}  # fmt: skip
TOY_EXPERIMENTS = {
    "experiment=figure1": "unknown experiment 'figure1'; did you mean 'fig1'? choose one of ablation, acceptance,…",
    "experiment=fig1 size=huge": "size: Invalid value 'huge', expected one of [toy, small, paper, shapes]…",
    "experiment=datasets size=shapes": "this experiment has no size 'shapes'; choose one of toy, small, paper",
    "experiment=fig1 backend=padded": "experiment=fig1 compares methods, and a method sets backend itself; leave…",
    "experiment=crossover budget=fixed": "experiment=crossover compares methods, and a method sets budget itself;…",
    "experiment=fig1 data=jsonl data.path=nowhere.jsonl": "data.path=nowhere.jsonl: no such file (looked in …",
    "experiment=fig1 data=demo data.kind=sing": "data.kind is 'sing'; the demo has prompts of the kinds continue,…",
}


@looped("given", SENTENCES, at_a_time=7)
def test_what_cannot_be_is_told_in_a_sentence(given: str, emssd: Callable) -> None:
    assert_said(emssd(*given.split(" ")).sentence, SENTENCES[given])


@looped("given", TOY_EXPERIMENTS, at_a_time=2)
def test_an_experiment_that_cannot_be_is_told_in_a_sentence(given: str, emssd: Callable) -> None:
    result = emssd("-m", "size=toy", "output_dir=out", "progress=false", *given.split(" "))
    assert (result.status, "Traceback" in result.err + result.out) == (2, False)
    assert_said(result.err.splitlines()[-1].removeprefix("emssd: error: "), TOY_EXPERIMENTS[given])


@looped("given", HYDRAS_OWN, at_a_time=7)
def test_what_hydra_refuses_is_told_in_one_line_with_a_hint(given: str, emssd: Callable) -> None:
    sentence = emssd(given).sentence
    assert all(part in sentence for part in HYDRAS_OWN[given]), sentence


def test_an_option_that_one_of_the_swept_choices_lacks_names_the_choice(emssd: Callable) -> None:
    sentence = emssd("-m", "drafter=llma_original,pld", "drafter.num_speculative_tokens=2", "output_dir=out").sentence
    assert sentence.startswith(
        "drafter 'llma' has no option 'num_speculative_tokens', which belongs to drafter=anpd, dflash, draft_model, "
    )
    assert ". It has match_length, copy_length" in sentence


@looped(
    "options, set_to, wrong",
    [
        ("scale: float = 1.0", "drafter.scale=inf", "drafter.scale is inf; it must be a finite number"),
        (
            "names: list[str] = field(default_factory=list)",
            "drafter.names=[[a]]",
            "drafter.names is [['a']]; each item must be a text",
        ),
        (
            "sizes: dict[str, int] = field(default_factory=dict)",
            "drafter.sizes.a=x",
            "drafter.sizes.a: Value 'x' of type 'str' could not be converted to Integer; ",
        ),
    ],
)
def test_the_options_of_a_strangers_plugin_are_held_to_the_same(
    options: str, set_to: str, wrong: str, install: Callable, emssd: Callable
) -> None:
    install("third", drafter(options=options))
    assert emssd("drafter=third", set_to).sentence.startswith(wrong)


def test_a_strangers_preset_is_held_to_the_same(emssd: Callable, work: Path) -> None:
    preset = work / "presets" / "drafter" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("defaults: [suffix]\nmax_spec_factor: .inf\n")
    options = ("--config-dir", "presets", "drafter=mine")
    assert emssd(*options).sentence == "drafter.max_spec_factor is inf; it must be a finite number"
    preset.write_text("defaults: [suffix]\nmax_spec_factor: long\n")
    assert emssd(*options).sentence.startswith(
        "In 'drafter/mine': ValidationError raised while composing config: Value 'lo"
    )


@looped("arguments", ["drafter=none,lama", "drafter=lama,none"])
def test_an_unknown_name_in_a_sweep_stops_it_before_it_starts(arguments: str, decode: Callable) -> None:
    result = decode("-m", arguments)
    assert result.sentence.startswith("unknown drafter 'lama'; did you mean 'llma'? ")
    assert result.files.keys() == {"multirun.yaml"}  # Hydra's own; no run


@looped("path", ["gpt-that-is-not-there", "./folder/that/is/not/there", "notes.txt"])
def test_a_model_path_that_holds_no_model(path: str, decode: Callable, work: Path) -> None:
    (work / "notes.txt").write_text("not a model")
    message = f"cannot load the model {path!r}: …Give a local folder with config.json and weights, a .gguf file, "
    message += "a model id of the Hugging Face hub, or 'demo' for the embedded model."
    assert_said(decode(f"model.path={path}").sentence, message)


def test_an_output_folder_below_a_regular_file(decode: Callable, work: Path) -> None:
    (work / "taken").write_text("")
    sentence = decode("output_dir=taken/out").sentence
    assert sentence == "cannot write to output_dir=taken/out: Not a directory; set output_dir to a writable folder"
    sentence = decode("output_dir=taken").sentence
    assert sentence.startswith("cannot write to output_dir=taken: there is a file of this name; set output_dir to ")


@looped("choice", ["backend=flashinfer", "-m backend=ragged,flashinfer"])
def test_flashinfer_without_cuda_says_why_not_and_what_instead(choice: str, decode: Callable) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = decode(*choice.split())
    assert result.sentence.startswith("backend 'flashinfer' is not available: it needs an NVIDIA GPU, and ")
    assert result.sentence.endswith("; use backend=ragged, which runs on any device.")
    assert not list(result.folder.glob("*/"))  # no run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("name", ["generations.jsonl", "config.yaml", "metrics.json"])
def test_a_full_disk(name: str, decode: Callable, work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / (name if name == "generations.jsonl" else f"{name}.part")).symlink_to("/dev/full")
    result = decode()
    kept = "finished rows stay in out, and resume=true keeps them"
    if name == "generations.jsonl":
        kept = "the rows before are kept. Make room, and go on with resume=true"
    assert result.sentence == f"cannot write out/{name}: No space left on device; {kept}"
    assert name != "metrics.json" or len(result.rows) == 5


@pytest.mark.parametrize("step", [1, 35])
def test_ctrl_c_keeps_the_finished_rows_and_speaks_of_them_if_there_are_some(
    step: int, decode: Callable, fail_at: Callable
) -> None:
    fail_at(step, KeyboardInterrupt())
    result = decode("batch_size=1", "drafter=none")
    assert result.status == 130
    if step == 1:
        assert result.err.endswith("emssd: interrupted\n")
        assert not result.folder.exists()
        return
    assert result.err.endswith(
        "emssd: interrupted; the rows that were finished are in out/, "
        "and resume=true output_dir=out goes on from there\n"
    )
    assert 1 <= len(result.rows) < 5
    assert "metrics.json" not in result.files


def test_a_preset_that_fails_is_named_beside_its_drafter(decode: Callable) -> None:
    assert decode("drafter=rest_original").sentence.endswith(" (drafter=rest_original)")


@looped("argument", ["batch_size", "drafter", "model.path"])
def test_of_a_long_value_the_beginning_is_repeated(argument: str, emssd: Callable) -> None:
    sentence = emssd(f"{argument}={3000 * 'x'}", "output_dir=out").sentence
    assert "xxxx" in sentence or "File name too long" in sentence
    assert len(sentence) < 1000
