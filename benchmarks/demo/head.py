"""Trains the demo's EAGLE-3 head anew: ``python -m benchmarks.demo.head --out DIR``.

Prompts are passages of the documentation that the running Python carries, as the demo's own are, but others. Acceptance
is measured with the demo's own.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path

from emssd_heads.training.job import RECORD, run
from emssd_heads.training.options import Eagle3Options
from rich.console import Console

from emssd.data.demo.corpus import documents, make_prompts


def prompts(variants: int) -> tuple[list[str], list[str]]:
    """So many times the demo's prompts with other passages, without any of its own; and its own."""
    docs = documents()
    own = [prompt.text for prompt in make_prompts(docs)]
    drawn = (prompt.text for number in range(1, variants + 1) for prompt in make_prompts(docs, f" {number}"))
    return [text for text in dict.fromkeys(drawn) if text not in own], own


def main(argv: Seq[str] | None = None) -> None:
    """Train, and write the head to the folder ``eagle3`` in that of ``--out``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo.head", description="Train the demo's EAGLE-3 head."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--variants", type=int, default=8, help="of each demo prompt (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=9, help="passes over the texts (default: %(default)s)")
    args = parser.parse_args(argv)
    work: Path = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    drawn, own = prompts(args.variants)
    data = work / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in drawn + own), encoding="utf-8")
    options = Eagle3Options(
        model="demo",
        data=str(data),
        output=str(work / "head"),
        held_out=len(own),
        max_new_tokens=64,
        learn_prompts=True,
        epochs=args.epochs,
        rows=8,
        lr=2e-3,
        depth=4,
        intermediate_size=384,
        num_kv_heads=1,
        draft_vocab_size=1024,
        dtype="float16",
        resume=(work / "head").exists(),
    )
    console = Console()
    if (acceptance := run(options, console)) is not None:
        console.print(acceptance.table())
    made = args.out / "eagle3"
    made.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", RECORD):
        shutil.copyfile(work / "head" / name, made / name)
    record = json.loads((made / RECORD).read_text(encoding="utf-8"))
    record["options"]["data"] = "python -m benchmarks.demo.head"
    (made / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
