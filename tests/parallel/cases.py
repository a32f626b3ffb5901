"""What the processes of a tensor parallel run decode, and one process alone: the same cases, the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
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
MEMORY = None
VOCABULARY = 13  # it does not divide by two, and chance acceptance is frequent
PROMPTS = [[1, 5, 6, 5, 6, 5, 6], [1, *(3 + i * i % 7 for i in range(40))], [4], [1, 5, 6, 5, 6, 7, 8, 9, 9, 3]]
SAMPLING = {"greedy": None, "sampled": SamplingParams(temperature=0.8, seed=3)}


def save(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> str:
    """A random checkpoint with a tokenizer; returns its folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = folder / f"{name}-{seed}"
    tiny_model(name, seed=seed, vocab_size=VOCABULARY, **MODELS.get(name, {}) | overrides).save_pretrained(path)
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="w1", unk_token="w3").save_pretrained(path)
    return str(path)


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
    """The tokens of `PROMPTS`; some rows wait, the last one begins like another, and memory makes some begin again."""
    target, tokenizer = loaded
    options = EngineOptions(batch_size=3, max_step_tokens=24, kv_memory=MEMORY, on_drafter_error="fail")
    engine = Engine.assemble(target, tokenizer, drafter=drafter, backend=backend, budget="fixed", options=options)
    rows = engine.generate([*PROMPTS, PROMPTS[1]], max_new_tokens=24, sampling=sampling, ignore_eos=True)
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
    every = [(name, "fused", sampling) for name in DRAFTERS for sampling in SAMPLING]
    others = [(name, backend, "greedy") for name in ("none", "tree") for backend in ("torch", "padded", "unpad_kv")]
    return [*every, *others] if model == "llama" else every
