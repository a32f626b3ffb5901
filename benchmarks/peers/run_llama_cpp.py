"""Runner of llama.cpp through its C interface, as `llama-cpp-python` binds it: continuous batches of greedy rows.

Its speculation (`common/speculative`) is C++ and is not in that interface. So this runner drafts itself, with the same
calls: the latest occurrence of the last tokens gives an n-gram's continuation, and a second context holds the draft
model. One `llama_decode` of all slots verifies; `llama_memory_seq_rm` takes back what was refused. The options are
``weights=bf16`` (or f32, q8_0, q4_0), of target and draft model, unless the target is a GGUF file; and
``unified=true``: one KV cache for all slots.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_of import gguf_of
from protocol import COPIED, DRAFTED, MATCHED, Build, Engine, Request, Tokens, options_of, serve

WEIGHTS = {"bfloat16": "bf16", "float32": "f32"}
MAX_STEP_TOKENS = 512  # its own default of n_ubatch
F32, F16 = 0, 1  # of ggml: types of the KV cache


@dataclass
class Row:
    """A prompt that is decoded in a slot; `cached` of its tokens are in each context's KV cache, by context."""

    index: int
    slot: int
    ids: list[int]
    end: int
    cached: dict[int, int] = field(default_factory=dict)


class Context:
    """A context of llama.cpp with a KV cache for `slots` rows of at most `length` tokens."""

    def __init__(self, path: Path, slots: int, length: int, threads: int, unified: bool, exact: bool) -> None:
        import llama_cpp

        self.c = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = slots * (-(-length // 256) * 256)
        params.n_seq_max, params.kv_unified = slots, unified
        params.n_batch = params.n_ubatch = MAX_STEP_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F32 if exact else F16
        model = llama_cpp.llama_model_load_from_file(bytes(path), llama_cpp.llama_model_default_params())
        self.context = llama_cpp.llama_init_from_model(model, params) if model else None
        if not self.context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(MAX_STEP_TOKENS, 0, 1)

    def next_tokens(self, feeds: list[tuple[Row, list[int]]]) -> list[list[int]]:
        """Feed each row's tokens that are not cached, and a draft; the likeliest tokens after each row and its draft.

        A row whose prompt has no place in this step has none yet.
        """
        import numpy as np

        batch, size, counts = self.batch, 0, []
        for row, draft in feeds:
            start = row.cached.get(id(self), 0)
            fed = (row.ids + draft)[start : start + MAX_STEP_TOKENS - size]
            wanted = 0
            for position, token in enumerate(fed, start):
                batch.token[size], batch.pos[size] = token, position
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, row.slot
                batch.logits[size] = position >= len(row.ids) - 1
                wanted += position >= len(row.ids) - 1
                size += 1
            row.cached[id(self)] = start + len(fed)
            counts.append(wanted)
        batch.n_tokens = size
        if status := self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        total = sum(counts)
        if not total:
            return [[] for _ in feeds]
        logits = np.ctypeslib.as_array(self.c.llama_get_logits(self.context), (total, self.vocabulary))
        best = iter(logits.argmax(axis=1).tolist())
        return [[next(best) for _ in range(count)] for count in counts]

    def keep(self, row: Row, length: int) -> None:
        """Forget what a row has cached after its first `length` tokens."""
        if row.cached.get(id(self), 0) > length:
            self.c.llama_memory_seq_rm(self.memory, row.slot, length, -1)
            row.cached[id(self)] = length


def copied(ids: list[int], most: int) -> list[int]:
    """At most `most` tokens after the latest earlier occurrence of the last `MATCHED`."""
    last = ids[-MATCHED:]
    for start in range(len(ids) - MATCHED - 1, -1, -1):
        if ids[start : start + MATCHED] == last:
            return ids[start + MATCHED : start + MATCHED + most]
    return []


def chains(context: Context, rows: list[Row], most: int) -> list[list[int]]:
    """A chain of at most `most` tokens for each row by the draft model, all rows at once."""
    drafts: list[list[int]] = [[] for _ in rows]
    for depth in range(most):
        live = [(row, drafts[i]) for i, row in enumerate(rows) if len(row.ids) + depth + 1 < row.end]
        if not live:
            break
        for (_, draft), best in zip(live, context.next_tokens([(row, draft) for row, draft in live]), strict=True):
            draft += best[-1:]
    return drafts


def decode(
    request: Request, prompts: Tokens, new: int, target: Context, draft: Context | None, counted: dict[str, int]
) -> Tokens:
    """All rows in continuous batches; a slot takes the next prompt as soon as its row has ended."""
    waiting, free = deque(enumerate(prompts)), list(range(request.batch_size))
    running: list[Row] = []
    done: dict[int, list[int]] = {}
    eos = set(request.eos)
    contexts = [target, draft] if draft else [target]
    while waiting or running:
        while waiting and free:
            index, ids = waiting.popleft()
            running.append(Row(index, free.pop(), list(ids), len(ids) + new))
        drafts = drafts_of(request.mode, running, target, draft)
        replies = target.next_tokens(list(zip(running, drafts, strict=True)))
        counted["steps"] += 1
        for row, drafted, best in zip(list(running), drafts, replies, strict=True):
            if not best:
                continue
            right = next((i for i, (a, b) in enumerate(zip(drafted, best, strict=False)) if a != b), len(best) - 1)
            before = len(row.ids)
            row.ids = (row.ids + best[: right + 1])[: row.end]
            counted["tokens"] += len(row.ids) - before
            counted["rows"] += 1
            for context in contexts:
                context.keep(row, len(row.ids) - 1)
            if len(row.ids) >= row.end or eos & set(row.ids[before:]):
                done[row.index] = row.ids[row.end - new :]
                for context in contexts:
                    context.keep(row, 0)
                free.append(row.slot)
                running.remove(row)
    return [done[i] for i in range(len(prompts))]


def drafts_of(mode: str, rows: list[Row], target: Context, draft: Context | None) -> list[list[int]]:
    """A draft for each row; none while its prompt is not cached, and for its last token."""
    drafts: list[list[int]] = [[] for _ in rows]
    ready = [i for i, row in enumerate(rows) if len(row.ids) - row.cached.get(id(target), 0) == 1]
    if mode == "ngram":
        for i in ready:
            drafts[i] = copied(rows[i].ids, min(COPIED, rows[i].end - len(rows[i].ids) - 1))
    elif draft and ready:
        for i, chain in zip(ready, chains(draft, [rows[i] for i in ready], DRAFTED), strict=True):
            drafts[i] = chain
    return drafts


def load(arguments: argparse.Namespace) -> Build:
    import llama_cpp

    llama_cpp.llama_backend_init()
    defaults = {"weights": WEIGHTS[arguments.dtype], "unified": "true", "export": "gguf"}
    options = options_of(arguments.option, defaults)
    folder, weights, model = Path(options["export"]), options["weights"], arguments.model
    path = Path(model) if model.endswith(".gguf") else gguf_of(model, folder, weights)

    def build(request: Request) -> Engine:
        def context(file: Path) -> Context:
            length = request.max_length + COPIED + 1
            unified = options["unified"] == "true"
            return Context(file, request.batch_size, length, arguments.threads, unified, weights == "f32")

        target = context(path)
        draft = None
        if request.mode == "draft_model":
            draft = context(gguf_of(arguments.draft_model, folder, weights))
        counted = {"steps": 0, "tokens": 0, "rows": 0}

        def generate(prompts: Tokens, new: int) -> Tokens:
            counted.update(steps=0, tokens=0, rows=0)
            return decode(request, prompts, new, target, draft, counted)

        system: Any = llama_cpp.llama_print_system_info()
        noted = {"weights": weights, "kv": "f32" if weights == "f32" else "f16", "system": system.decode()}
        return Engine(generate, lambda: counted | noted)

    return build


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
