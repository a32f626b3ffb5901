"""Plays vLLM around a `Proposer` for known texts: runs rows side by side, verifies drafts, fills gaps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np

from emssd.integrations.vllm import Proposer

__all__ = ["Served", "serve", "vllm_config"]

Served = list[tuple[int, int]]  # of a row: where it stood and how many drafted tokens were right, in each step


def vllm_config(drafted: int, max_model_len: int, vocab_size: int) -> Any:
    """The part of a ``VllmConfig`` that a proposer reads."""
    model = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: vocab_size)
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=drafted), model_config=model)


def serve(proposer: Proposer, texts: Seq[Seq[int]], prompts: Seq[int], slots: int, max_model_len: int) -> list[Served]:
    """Decode ``texts[i]``, of which the first ``prompts[i]`` tokens are the prompt, `slots` rows at a time.

    As in vLLM 0.32: a row's first step gives it one token, or none yet if its index is odd; the last row takes the
    place of one that ended; arrays are as long as the longest batch, and what is after a row's end is of older rows.
    """
    table = np.zeros((slots, max_model_len), dtype=np.int32)
    lengths = np.zeros(slots, dtype=np.int32)
    waiting, rows = list(range(len(texts))), list[int]()
    done: list[Served] = [[] for _ in texts]
    ends, chains, patient = list(prompts), [list[int]() for _ in texts], {i for i in range(len(texts)) if i % 2}
    while waiting or rows:
        while waiting and len(rows) < slots:
            rows.append(waiting.pop(0))
        sampled: list[list[int]] = []
        for place, row in enumerate(rows):
            text, end = texts[row], ends[row]
            new: list[int] = []
            if row in patient:
                patient.remove(row)
            else:
                right = 0
                while (
                    right < len(chains[row]) and end + right + 1 < len(text) and chains[row][right] == text[end + right]
                ):
                    right += 1
                new = list(text[end : end + right + 1])
                if end > prompts[row]:
                    done[row].append((end, right))
            ends[row] = end + len(new)
            table[place, : ends[row]] = text[: ends[row]]
            lengths[place] = ends[row]
            sampled.append(new)
        proposed = proposer.propose(sampled, lengths, table, slot_mappings=None)
        for row, chain in zip(rows, proposed, strict=True):
            chains[row] = chain
        for place in reversed(range(len(rows))):
            if ends[rows[place]] == len(texts[rows[place]]):
                rows[place] = rows[-1]
                rows.pop()
    return done
