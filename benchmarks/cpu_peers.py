"""Compares emssd with other engines on this machine: same models, prompts, precision, threads and batch sizes.

    nox -s peers                                         # makes the environments of vLLM, OpenVINO and llama.cpp, once
    python benchmarks/cpu_peers.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl --out results/cpu_peers.json

Every engine runs in a process of its own that loads and warms up before the clock starts; all prompts are handed over
at once, and no more than the batch size run together. The repeats of all engines in one mode, at one batch size, are
interleaved. Tokens are counted up to and including EOS. Beside each speed stands the number of rows with the tokens of
Hugging Face `generate` at batch 1, in the same precision and in float32, and with the tokens of the same engine's plain
greedy decoding at the smallest batch size. For a peer that is not installed, the program prints how to install it.

`--model FILE.gguf` compares emssd and llama.cpp on that file, without references. `--data FILE.txt` has a prompt in
each line.

`--device cuda` compares on a GPU: both ways of Hugging Face, emssd with `backend=flashinfer`, and vLLM where `--python
vllm=FILE` names an interpreter that has a build of it for GPUs. OpenVINO stays on the CPU and is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from emssd_lab.provenance import provenance
from peers.comparison import Comparison, references_of
from peers.figures import figures, speed_table
from peers.protocol import COPIED, DRAFTED, MATCHED, MODES, Request
from peers.workers import PEERS, PeerError, Setting, interpreter_of
from rich.console import Console
from rich.progress import Progress

from emssd.data.model_folder import gguf_of
from emssd.data.prompts import FailedPrompt, check_prompt, encode_prompts
from emssd.data.records import RecordsConfig, content_of, records_in, to_prompts
from emssd.errors import EmssdError, PromptError
from emssd.model.load.checkpoint import load_tokenizer
from emssd.model.load.gguf_model import converted_folder

PATHS = ("model", "draft_model", "data", "python", "openvino_export", "gguf", "references", "logs", "out")
TEMPLATES = {"copy-heavy": "<s>Question: {question}\nRestated:", "plain": "<s>Question: {question}\nAnswer:"}
DEFAULT_PEERS = ["emssd", "hf", "hf_generate_batch", "vllm", "openvino"]


def request_of(arguments: argparse.Namespace) -> Request:
    """The prompts' token ids and what ends a row; mode and batch size are to be replaced."""
    from transformers import AutoConfig, GenerationConfig

    file = gguf_of(arguments.model)
    config = AutoConfig.from_pretrained(converted_folder(file, "config") if file else arguments.model)
    longest = config.max_position_embeddings - arguments.max_new_tokens
    ids = encode_prompts(texts_of(arguments), load_tokenizer(arguments.model))
    for number, prompt_ids in enumerate(ids):
        check_prompt(prompt_ids, longest, config.vocab_size, str(number))
    eos = config.eos_token_id
    if (Path(arguments.model) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(arguments.model).eos_token_id or eos
    return Request("greedy", 1, arguments.max_new_tokens, ids, eos if isinstance(eos, list) else [eos])


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """The prompts' texts: lines of a ``.txt``, or of questions with a template."""
    if arguments.data.endswith(".txt"):
        return content_of(arguments.data)[1].decode().splitlines()[: arguments.num_prompts]
    records = RecordsConfig(template=TEMPLATES[arguments.prompts], limit=arguments.num_prompts)
    texts = []
    for prompt in to_prompts(records_in(*content_of(arguments.data)), records, arguments.data):
        if isinstance(prompt, FailedPrompt):
            raise PromptError(prompt.error)
        texts.append(prompt.text)
    return texts


def installed(names: list[str], interpreters: dict[str, str], console: Console) -> list[str]:
    """The peers that can run here. For each of the others, prints how to install it."""
    installed_peers = []
    for name in names:
        try:
            interpreter_of(name, interpreters)
            installed_peers.append(name)
        except PeerError as error:
            console.print(str(error), style="yellow", highlight=False, soft_wrap=True)
    return installed_peers


def kept_references(
    file: Path | None, peer: str, request: Request, setting: Setting, logs: Path, console: Console
) -> dict[str, list[list[int]]]:
    """References that `file` keeps, perhaps of more prompts; or new ones, which it then keeps. A GGUF file has none."""
    if setting.model.endswith(".gguf"):
        return {}
    wanted = [peer, Path(setting.model).name, setting.dtype, request.max_new_tokens]
    if file and file.is_file():
        kept, number = json.loads(file.read_text()), len(request.prompts)
        if kept["asked"] != wanted or kept["prompts"][:number] != request.prompts:
            raise SystemExit(f"cpu_peers.py: error: --references {file}: they are of other prompts; name another file")
        return {name: tokens[:number] for name, tokens in kept["found"].items()}
    installed_peers = references_of(request, setting, logs, console, peer)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"asked": wanted, "prompts": request.prompts, "found": installed_peers}) + "\n")
    return installed_peers


def run_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Program, options and machine, without the paths of this machine."""
    machine = provenance(torch.device(arguments.device), getattr(torch, arguments.dtype))
    return {
        "script": "benchmarks/cpu_peers.py",
        **{name: machine[name] for name in ("commit", "date")},
        **{name: machine["hardware"][name] for name in ("processor", "device", "cores")},
        "python": machine["versions"]["python"],
        "models": {"target": Path(arguments.model).name, "draft": Path(arguments.draft_model).name},
        "data": Path(arguments.data).name,
        "options": {name: value for name, value in vars(arguments).items() if name not in PATHS},
        "speculation": {"matched": MATCHED, "copied": COPIED, "drafted": DRAFTED},
    }


def pairs_of(options: list[str]) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in options)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target, or a GGUF file")
    parser.add_argument("--draft-model", help="folder of the draft model; the target by default")
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question', or text")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=DEFAULT_PEERS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--greedy-only", nargs="+", default=[], choices=list(PEERS), help="peers without other modes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompts", choices=list(TEMPLATES), default="copy-heavy")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--emssd", nargs="+", default=[], metavar="NAME=VALUE", help="options; see peers/run_emssd.py")
    parser.add_argument("--vllm", nargs="+", default=[], metavar="NAME=VALUE", help="options; see peers/run_vllm.py")
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=FILE", help="interpreters of peers")
    parser.add_argument("--openvino-export", type=Path, default=Path(".nox/openvino-export"), help="exported models")
    parser.add_argument("--gguf", type=Path, default=Path(".nox/gguf"), help="models in llama.cpp's format")
    parser.add_argument("--reference-peer", default="hf", choices=["hf", "emssd"], help="whose float32 is right")
    parser.add_argument("--references", type=Path, help="JSON file: read if it is there, and written if not")
    parser.add_argument("--logs", type=Path, help="folder for the engines' own output; a temporary one by default")
    parser.add_argument("--out", type=Path, help="JSON file; written after every batch size")
    arguments = parser.parse_args()
    arguments.draft_model = arguments.draft_model or arguments.model
    for name, path in (("--model", arguments.model), ("--draft-model", arguments.draft_model)):
        if not ((Path(path) / "config.json").is_file() or (path.endswith(".gguf") and Path(path).is_file())):
            parser.error(f"{name} {path}: no such folder with a config.json, nor such a GGUF file; give a local model")
    if arguments.device != "cpu":
        arguments.peers = [name for name in arguments.peers if not name.startswith(("openvino", "llama_cpp"))]
    if unknown := sorted(pairs_of(arguments.python).keys() - PEERS):
        parser.error(f"--python {unknown[0]}=…: no such peer; there are {', '.join(PEERS)}")
    return arguments


def main() -> None:
    arguments, console = parsed(), Console()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="cpu-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        str(Path(arguments.model).resolve()),
        str(Path(arguments.draft_model).resolve()),
        arguments.dtype,
        arguments.threads,
        {
            "emssd": arguments.emssd,
            "vllm": arguments.vllm,
            "openvino": [f"export={arguments.openvino_export.resolve()}"],
            "llama_cpp": [f"export={arguments.gguf.resolve()}"],
        },
        pairs_of(arguments.python),
        arguments.device,
    )
    try:
        request = request_of(arguments)
    except EmssdError as error:
        raise SystemExit(f"cpu_peers.py: error: {error}") from None
    peers = installed(arguments.peers, setting.interpreters, console)
    if not peers:
        raise SystemExit("cpu_peers.py: error: none of the peers is installed")
    try:
        references = kept_references(arguments.references, arguments.reference_peer, request, setting, logs, console)
    except PeerError as error:
        raise SystemExit(f"cpu_peers.py: error: no reference outputs: {error}; logs are in {logs}") from None
    results: dict[str, Any] = {"run": run_of(arguments), "cells": []}
    with Progress(console=console, transient=True) as progress:
        compared = Comparison(request, setting, logs, progress)
        for batch, mode in product(arguments.batch_sizes, arguments.modes):  # all at once: more memory than there is
            cells = [(peer, mode, batch) for peer in peers if PEERS[peer].has(mode, batch)]
            cells = [cell for cell in cells if cell[0] not in arguments.greedy_only or cell[1] == "greedy"]
            if cells:
                compared.run(cells, arguments.repeats)
            results["cells"] = figures(compared.answers, references, compared.failed)
            results["run"]["versions"] = compared.versions
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    prompts = Path(arguments.data).name if arguments.data.endswith(".txt") else f"{arguments.prompts} prompts"
    print(f"\n{results['run']['processor']}, {arguments.dtype}, {arguments.threads} threads, {prompts}")
    print(f"\n{speed_table(results['cells'])}")
    if compared.failed:
        raise SystemExit(f"{len(compared.failed)} cells failed; the engines' own output is in {logs}")


if __name__ == "__main__":
    main()
