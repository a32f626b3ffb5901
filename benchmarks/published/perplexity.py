"""Perplexity of texts by a GGUF file: packed and dense, or by llama.cpp in its own environment.

python benchmarks/published/perplexity.py FILE benchmarks/published/english.txt
.nox/peers-llama_cpp/bin/python benchmarks/published/perplexity.py FILE benchmarks/published/english.txt
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

Judge = Callable[[str], tuple[list[int], Any]]  # the tokens of a text, BOS first, and logits [tokens, vocabulary]


def llama_cpp(file: Path) -> Iterator[tuple[str, Judge]]:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=512, n_threads=2, logits_all=True, verbose=False)

    def judge(text: str) -> tuple[list[int], Any]:
        ids = model.tokenize(text.encode())
        model.reset()
        model.eval(ids)
        return ids, model.scores[: len(ids)]

    yield "llama.cpp", judge


def emssd(file: Path) -> Iterator[tuple[str, Judge]]:
    import torch

    from emssd.model import ModelOptions, load_model

    for weights in ("auto", "dense"):
        for dtype in ("float32", "bfloat16"):
            target, tokenizer = load_model(ModelOptions(str(file), weights=weights, dtype=dtype, compile=False))

            def judge(text: str, model: Any = target.model, tokenizer: Any = tokenizer) -> tuple[list[int], Any]:
                ids = tokenizer(text).input_ids
                with torch.inference_mode():
                    return ids, model(torch.tensor([ids])).logits[0].float().numpy()

            yield f"{'packed' if weights == 'auto' else weights}, {dtype}", judge


def main(file: Path, texts: list[str]) -> None:
    for name, judge in (llama_cpp if find_spec("llama_cpp") else emssd)(file):
        losses = list[float]()
        for ids, logits in map(judge, texts):
            largest = logits.max(-1, keepdims=True).astype(np.float64)
            logs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
            losses += (-logs[np.arange(len(ids) - 1), ids[1:]]).tolist()
        print(f"{name:18} {np.exp(np.mean(losses)):8.3f} of {len(losses)} tokens", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
