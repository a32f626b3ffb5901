"""What the processes of a tensor parallel run decode, and one process alone: the same cases, the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.testing import tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {},  # a sliding window of 7
    "gpt_neox": {},  # queries, keys and values of a head lie side by side in one matrix
    "opt": {},  # the plan is ours
}
DRAFTERS = ("none", "suffix", "llma", "draft_model", "tree")
VOCABULARY = 13  # it does not divide by two, and chance acceptance is frequent
PROMPTS = [[1, 5, 6, 5, 6, 5, 6], [1, *(3 + i * i % 7 for i in range(40))], [4], [1, 5, 6, 5, 6, 7, 8, 9, 9, 3]]
SAMPLING = {"greedy": None, "sampled": SamplingParams(temperature=0.8, seed=3)}


def save(folder: Path, name: str, *, seed: int = 0) -> None:
    """A random checkpoint with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = folder / f"{name}-{seed}"
    tiny_model(name, seed=seed, vocab_size=VOCABULARY, **MODELS[name]).save_pretrained(path)
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="w1", unk_token="w3").save_pretrained(path)


def drafter(name: str, model: str) -> Any:
    """The drafter of a case. A chain is drafted by the target itself, and a tree by another model of its kind.

    Args:
        name: of the case.
        model: folder of the checkpoints, without their seeds.
    """
    from emssd_draft_model import DraftModelConfig, TreeKind

    if name == "draft_model":
        return DraftModelConfig(path=f"{model}-0")
    if name == "tree":
        return DraftModelConfig(path=f"{model}-1", tree=TreeKind.dynamic, num_nodes=6, depth=3, top_k=2)
    return name


def decoded(
    loaded: tuple[TargetModel, Any], drafter: Any, backend: Any, sampling: SamplingParams | None
) -> list[list[int]]:
    """The tokens of `PROMPTS`: some rows wait, prompts come in pieces, and the last one begins like another."""
    target, tokenizer = loaded
    options = EngineOptions(batch_size=3, max_step_tokens=24, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, tokenizer, drafter=drafter, backend=backend, budget="fixed", options=options)
    rows = engine.generate([*PROMPTS, PROMPTS[1]], max_new_tokens=16, sampling=sampling, ignore_eos=True)
    return [list(row.token_ids) for row in rows]


def backends() -> dict[str, Any]:
    """By name: ragged in C++ and in torch, and padded, with one padding and with two."""
    from emssd_padded import PaddedConfig
    from emssd_ragged import Kernels, RaggedConfig

    return {
        "fused": RaggedConfig(kernels=Kernels.fused),
        "torch": RaggedConfig(kernels=Kernels.torch),
        "padded": PaddedConfig(),
        "unpad_kv": PaddedConfig(pad_kv=False),
    }


def cases(model: str) -> list[tuple[str, str, str]]:
    """Drafter, backend and sampling of what is decoded with a model."""
    if model != "llama":
        return [("suffix", "fused", "sampled"), ("draft_model", "fused", "greedy"), ("tree", "padded", "sampled")]
    every = [(name, "fused", sampling) for name in DRAFTERS for sampling in SAMPLING]
    return [*every, *(("tree", backend, "greedy") for backend in ("torch", "padded", "unpad_kv"))]
