"""The distance of a model with `model.weights=int8` from the one whose weights are rounded.

    python benchmarks/int8_quality.py --model MODEL --data gsm8k.jsonl --dtype float32

Texts are questions with their answers. *Perplexity* is of the answers' tokens, *the same token* the share of their
positions where both models find the same one likeliest, and *the same text* the share of prompts that both answer
with the same greedy tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from common import make_parser, save
from rich.console import Console
from rich.progress import track

from emssd import Engine

PROMPT = "<s>Question: {question}\nAnswer:"


@torch.inference_mode()
def judged(model: Any, texts: list[tuple[list[int], list[int]]], name: str) -> tuple[float, list[int]]:
    """The mean negative log-likelihood of the answers' tokens, and the likeliest token at each of their places."""
    loss, likeliest = 0.0, list[int]()
    for prompt, answer in track(texts, f"answers by {name}"):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        likeliest += logits.argmax(-1).tolist()
    return loss / len(likeliest), likeliest


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with question and answer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    lines = options.data.read_text(encoding="utf-8").splitlines()[options.skip : options.skip + options.limit]
    records = [json.loads(line) for line in lines]
    results = {}
    for weights in ("auto", "int8"):
        engine = Engine.from_pretrained(
            options.model, dtype=options.dtype, weights=weights, compile=True, drafter="none"
        )
        encode = engine.tokenizer.encode
        prompts = [PROMPT.format(question=record["question"]) for record in records]
        texts = [
            (encode(prompt, add_special_tokens=False), encode(" " + record["answer"], add_special_tokens=False))
            for prompt, record in zip(prompts, records, strict=True)
        ]
        answers = [done.token_ids for done in engine.generate(prompts, options.max_new_tokens)]
        results[weights] = *judged(engine.target.model, texts, weights), answers
    (loss, tokens, answers), (other_loss, other_tokens, other_answers) = results["auto"], results["int8"]
    result = {
        "perplexity": math.exp(loss),
        "perplexity_int8": math.exp(other_loss),
        "same_token": sum(map(int.__eq__, tokens, other_tokens)) / len(tokens),
        "same_text": sum(one == other for one, other in zip(answers, other_answers, strict=True)) / len(answers),
        "num_tokens": len(tokens),
        "num_texts": len(answers),
    }
    Console().print(result)
    save(options.out, result, dtype=engine.target.dtype)


if __name__ == "__main__":
    main()
