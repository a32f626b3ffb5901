"""Helpers to compare with the library `speculators`: float64 arithmetic, random weights, engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Drafter, DrafterContext
from emssd.integrations.vllm import Proposer
from emssd.model import TargetModel
from tests.support.backends import context_of

PROMPTS = [(1, 3, 4, 6, 0, 7, 8, 3, 9, 11), (5,), (7, 8, 7, 8, 7, 8, 2)]


@contextmanager
def all_double() -> Iterator[None]:
    """Code that computes norms and angles in float32, whatever the dtype, computes them in float64."""
    with pytest.MonkeyPatch.context() as wide:
        wide.setattr(torch, "float32", torch.float64)
        wide.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random parameters, large enough that each matters; vectors, those of norms, lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))


def speculated(algorithm: str, num_tokens: int, verifier: Path) -> Any:
    """The part of a container's config that says whose drafter it is."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(verifier)),
    )


def choose_tokens(head: Any, drafted: Seq[int], vocab_size: int) -> None:
    """Tell a head of theirs which tokens it drafts."""
    chosen = torch.zeros(vocab_size, dtype=torch.bool)
    chosen[list(drafted)] = True
    head.load_vocab_mappings(chosen, torch.tensor(drafted) - torch.arange(len(drafted)))


def decode(target: TargetModel, load: Callable[[DrafterContext], Drafter], num_new: int) -> list[tuple[int, ...]]:
    """The texts after `PROMPTS`, which three rows decode together, in order and with their prompts."""
    context = context_of(target, batch_size=len(PROMPTS))
    options = EngineOptions(batch_size=len(PROMPTS), max_step_tokens=16, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, None, drafter=load(context), backend="ragged", budget="fixed", options=options)
    texts: Seq[Any] = engine.generate(PROMPTS, num_new, ignore_eos=True)
    return [(*prompt, *text.token_ids) for prompt, text in zip(PROMPTS, texts, strict=True)]


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
        for slot, row in enumerate(rows):
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
            table[slot, : ends[row]] = text[: ends[row]]
            lengths[slot] = ends[row]
            sampled.append(new)
        proposed = proposer.propose(sampled, lengths, table, slot_mappings=None)
        for row, chain in zip(rows, proposed, strict=True):
            chains[row] = chain
        for slot in reversed(range(len(rows))):
            if ends[rows[slot]] == len(texts[rows[slot]]):
                rows[slot] = rows[-1]
                rows.pop()
    return done
