"""llama.cpp on a GGUF file: tokens/s, and how many texts change with drafts or with the batch.

.nox/peers-llama_cpp/bin/python benchmarks/published/beside_llama_cpp.py FILE benchmarks/published/english.txt
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

import llama_cpp
from protocol import COPIED, Request, Tokens
from run_llama_cpp import Context, decode

NEW, THREADS = 48, 2


def tokens_of(file: Path, texts: list[str]) -> Tokens:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    vocabulary = llama_cpp.llama_model_get_vocab(llama_cpp.llama_model_load_from_file(bytes(file), params))
    ids, room = [], (llama_cpp.llama_token * 256)()
    for text in texts:
        count = llama_cpp.llama_tokenize(vocabulary, text.encode(), len(text.encode()), room, 256, True, False)
        ids.append(list(room[:count]))
    return ids


def main(file: Path, prompts: Path) -> None:
    llama_cpp.llama_backend_init()
    ids = tokens_of(file, prompts.read_text(encoding="utf-8").splitlines())
    length, reference = max(map(len, ids)) + NEW, None
    print(f"{'mode':6} {'batch':5} {'tokens/s':8} texts changed, of {len(ids)}")
    for mode in ("plain", "ngram"):
        for batch_size in (1, 4, 8):
            request = Request(mode, batch_size, NEW, ids, eos=[])
            context = Context(file, batch_size, length + COPIED + 1, THREADS, True, False)
            counted = {"steps": 0, "tokens": 0, "rows": 0}
            start = time.perf_counter()
            texts = decode(request, ids, NEW, context, None, counted)
            seconds = time.perf_counter() - start
            reference = reference or texts
            changed = sum(text != other for text, other in zip(texts, reference, strict=True))
            print(f"{mode:6} {batch_size:5} {counted['tokens'] / seconds:8.1f} {changed}", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
