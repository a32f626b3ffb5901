"""The distance of a model with packed weights from one that computes with dense ones.

    python benchmarks/packed_quality.py --models MODEL A.gguf B.gguf --data gsm8k.jsonl

A folder's model is compared with itself under `model.weights=int8`; a GGUF file with itself under
`model.weights=dense`. Texts are questions with their answers. *Perplexity* is of the answers' tokens, *the same token*
the share of their positions where both models find the same one likeliest, and *the same text* the share of prompts
that both answer with the same greedy tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from common import make_parser, save, show
from rich.progress import track

from emssd import Engine


@torch.inference_mode()
def judged(model: Any, texts: list[tuple[list[int], list[int]]], name: str) -> tuple[float, list[int]]:
    """The mean negative log-likelihood of the answers' tokens, and the likeliest token at each of their places."""
    loss, likeliest = 0.0, list[int]()
    for prompt, answer in track(texts, f"answers by {name}"):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        likeliest += logits.argmax(-1).tolist()
    return loss / len(likeliest), likeliest


def distance(path: str, records: list[dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    results = []
    for weights in ("dense", "auto") if path.endswith(".gguf") else ("auto", "int8"):
        engine = Engine.from_pretrained(path, dtype=options.dtype, weights=weights, drafter="none", batch_size=8)
        encode = engine.tokenizer.encode
        prompts = [options.template.replace("\\n", "\n").format(**record) for record in records]
        texts = [
            (encode(prompt, add_special_tokens=False), encode(" " + record["answer"], add_special_tokens=False))
            for prompt, record in zip(prompts, records, strict=True)
        ]
        ids = [prompt for prompt, _ in texts]
        answers = [done.token_ids for done in engine.generate(ids, options.max_new_tokens)]
        results.append((*judged(engine.target.model, texts, f"{Path(path).name}, {weights}"), answers))
    (loss, tokens, answers), (packed_loss, packed_tokens, packed_answers) = results
    return {
        "model": Path(path).name,
        "perplexity": math.exp(loss),
        "perplexity_packed": math.exp(packed_loss),
        "same_token": sum(map(int.__eq__, tokens, packed_tokens)) / len(tokens),
        "same_text": sum(one == other for one, other in zip(answers, packed_answers, strict=True)) / len(answers),
        "num_tokens": len(tokens),
        "num_texts": len(answers),
        "dtype": str(engine.target.dtype).removeprefix("torch."),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"], help="folders and GGUF files")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with question and answer")
    parser.add_argument("--template", default="<s>Question: {question}\\nAnswer:", help="of prompts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    lines = options.data.read_text(encoding="utf-8").splitlines()[options.skip : options.skip + options.limit]
    records = [json.loads(line) for line in lines]
    rows = [distance(path, records, options) for path in options.models]
    show("Packed beside dense", rows[0], (row.values() for row in rows))
    save(options.out, rows)


if __name__ == "__main__":
    main()
