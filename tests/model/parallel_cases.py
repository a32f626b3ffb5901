"""Cases for the processes of a tensor parallel run, and for one process alone: the same code decodes them.

As a program that torchrun starts, all processes decode every case, and process 0 writes the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from emssd import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.errors import ConfigError, EmssdError
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.model.load import loading
from emssd.model.run.parallel import join
from emssd.sampling import SamplingParams
from tests.support.backends import CONFIGS
from tests.support.perfect_head import VOCAB, perfect_target, write_perfect_eagle, write_perfect_eagle3

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {},  # a sliding window of 7
    "gpt_neox": {},  # queries, keys and values of a head lie side by side in one matrix
    "opt": {},  # the plan is ours
    "qwen3_5_text": {},  # layers that keep a state
    "granitemoe_swa": {},  # experts, attention sinks, and a sliding window in one layer
}
DRAFTERS = (
    "none", "suffix", "llma", "lookahead", "token_recycling", "ngrammys", "union", "auto", "early_exit", "draft_model",
    "tree", "adaptive",
)  # fmt: skip
VOCABULARY = 13  # it does not divide by two, and chance acceptance is frequent
PROMPTS = [[1, 5, 6, 5, 6, 5, 6], [1, *(3 + i * i % 7 for i in range(40))], [4], [1, 5, 6, 5, 6, 7, 8, 9, 9, 3]]
SAMPLING = {"greedy": None, "sampled": SamplingParams(temperature=0.8, seed=3)}


def save(folder: Path, name: str, *, seed: int = 0) -> None:
    """A random checkpoint with a tokenizer."""
    if name == "granitemoe_swa":
        model = _experts_and_sinks(seed)
    else:
        model = tiny_model(name, seed=seed, vocab_size=VOCABULARY, **MODELS[name])
    _save(folder / f"{name}-{seed}", model)


def _experts_and_sinks(seed: int) -> Any:
    config = AutoConfig.for_model(
        "granitemoe_swa", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(1.0, 2.0)
    return model


def save_perfect(folder: Path) -> None:
    """The target of `tests.support.perfect_head` with three more heads, which do nothing, and perfect heads for it."""
    three = perfect_target()
    config = type(three.config)(**three.config.to_dict() | {"num_attention_heads": 6, "num_key_value_heads": 6})
    more = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    weights = more.state_dict()
    for name, weight in three.state_dict().items():
        weights[name].zero_()
        weights[name][tuple(map(slice, weight.shape))] = weight
    more.load_state_dict(weights)
    _save(folder / "perfect", more)
    write_perfect_eagle3(folder / "eagle3")
    write_perfect_eagle(folder / "eagle")


def _save(path: Path, model: Any) -> None:
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", unk_token="w3").save_pretrained(path)


def drafter(name: str, model: str) -> Any:
    """The drafter of a case. A chain is drafted by the target itself, and a tree by another model of its kind.

    Args:
        name: of the case.
        model: folder of the checkpoints, without their seeds.
    """
    from emssd_draft_model import DraftModelConfig, TreeKind

    if name == "draft_model":
        return DraftModelConfig(path=f"{model}-0")
    if name == "adaptive":
        return "suffix"
    if name == "tree":
        return DraftModelConfig(path=f"{model}-1", tree=TreeKind.dynamic, num_nodes=6, depth=3, top_k=2)
    return name


def decoded(
    loaded: tuple[TargetModel, Any], drafter: Any, backend: Any, sampling: SamplingParams | None, budget: str = "fixed"
) -> list[list[int]]:
    """The tokens of `PROMPTS`: some rows wait, prompts come in pieces, and the last one begins like another."""
    target, tokenizer = loaded
    options = EngineOptions(batch_size=3, max_step_tokens=24, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, tokenizer, drafter=drafter, backend=backend, budget=budget, options=options)
    rows = engine.generate([*PROMPTS, PROMPTS[1]], max_new_tokens=16, sampling=sampling, ignore_eos=True)
    return [list(row.token_ids) for row in rows]


def preempted(loaded: tuple[TargetModel, Any], kv_memory: str) -> tuple[list[list[int]], int]:
    """Tokens of rows that outgrow the memory together, and how often one lost its KV to others and began again."""
    target, tokenizer = loaded
    options = EngineOptions(batch_size=3, kv_memory=kv_memory)
    engine = Engine.assemble(target, tokenizer, drafter="suffix", backend="ragged", budget="fixed", options=options)
    rows = engine.generate([[4], [5], [6]], max_new_tokens=110, ignore_eos=True)
    return [list(row.token_ids) for row in rows], engine.report.num_preempted


def headed(loaded: tuple[TargetModel, Any], name: str, folder: Path) -> dict[str, list[Any]]:
    """The tokens of the perfect target, and how many drafted tokens of its perfect head it accepts, row by row."""
    from emssd_heads.eagle import EagleConfig
    from emssd_heads.eagle3 import Eagle3Config

    target, tokenizer = loaded
    config = {"eagle": EagleConfig, "eagle3": Eagle3Config}[name](path=str(folder / name))
    options = EngineOptions(batch_size=2, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, tokenizer, drafter=config, backend="ragged", budget="fixed", options=options)
    prompts = [[1, 3, 4], [1, 7, *(i % VOCAB for i in range(11))], [4, 4]]
    rows = engine.generate(prompts, max_new_tokens=16, ignore_eos=True)
    return {"tokens": [[*row.token_ids] for row in rows], "accepted": [row.num_accepted for row in rows]}


def cases(model: str) -> list[tuple[str, str, str]]:
    """Drafter, backend and sampling of what is decoded with a model."""
    if model != "llama":
        return [("suffix", "fused", "sampled"), ("draft_model", "fused", "greedy"), ("tree", "padded", "sampled")]
    every = [(name, "fused", sampling) for name in DRAFTERS for sampling in SAMPLING]
    return [*every, *(("tree", backend, "greedy") for backend in ("torch", "padded", "unpad_kv"))]


UNREADABLE = "opt-1"  # by the other processes than the first


def without(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, on a machine whose disk has no folder `name`."""

    def other(options: ModelOptions, *more: Any, **keywords: Any) -> Any:
        if Path(options.path).name == name:
            raise ConfigError("there is no such folder here")
        return load(options, *more, **keywords)

    return other


def refused(act: Callable[[], Any]) -> str:
    """The sentence that refuses this."""
    with pytest.raises(EmssdError) as caught:
        act()
    return str(caught.value)


def main(folder: Path) -> None:
    """Decode every case."""
    messages, tokens_of, heads = dict[str, str](), dict[str, list[list[int]]](), dict[str, list[int]]()
    missing, unreadable = (ModelOptions(str(folder / name), tensor_parallel=True) for name in ("nowhere", UNREADABLE))
    messages["missing"] = refused(lambda: load_model(missing))
    with pytest.MonkeyPatch.context() as patch:
        if join().rank:
            patch.setattr(loading, "load_checkpoint", without(UNREADABLE, loading.load_checkpoint))
        messages["unreadable"] = refused(lambda: load_model(unreadable))
    for model in MODELS:
        loaded = load_model(ModelOptions(str(folder / f"{model}-0"), tensor_parallel=True))
        heads[model] = [layer.num_kv_heads for layer in loaded[0].layers]
        for name, backend, sampling in cases(model):
            made = drafter(name, str(folder / model))
            budget = "adaptive" if name == "adaptive" else "fixed"
            tokens = decoded(loaded, made, CONFIGS[backend], SAMPLING[sampling], budget)
            tokens_of[f"{model} {name} {backend} {sampling}"] = tokens
    again = preempted(load_model(ModelOptions(str(folder / "llama-0"), tensor_parallel=True)), "60KiB")
    perfect = load_model(ModelOptions(str(folder / "perfect"), tensor_parallel=True))
    with_heads = {name: headed(perfect, name, folder) for name in ("eagle3", "eagle")}
    messages["borrowed"] = refused(lambda: decoded(loaded, "self", "ragged", None))
    messages["shard"] = refused(lambda: Engine.from_model(loaded[0].model))
    if join().rank == 0:
        results = {"tokens": tokens_of, "headed": with_heads, "preempted": again, "messages": messages, "heads": heads}
        (folder / "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
