"""Each draft of a running engine is that of one dense pass over the whole row, written out from the published formulas.

float64; the target's hidden states are those of Transformers, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.dflash import DFlashConfig, emssd_drafters
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.errors import ConfigError
from emssd.model import TargetModel
from tests.support.backends import context_of
from tests.support.heads import Weights, dense_layer, dense_rms, layer_weights, random_weights, refusal, write_head
from tests.support.tiers import looped

VOCAB, SIZE, NUM_NEW = 17, 32, 14
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3, 9, 9, 2, 1], [6], [7, 8, 3]]
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "block_size": 5,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [2, 0]},
}
DSPARK = {"projector_type": "dspark", "markov_rank": 3, "sample_from_anchor": True, "enable_confidence_head": True}
NAMED: dict[str, Any] = {"architectures": ["DSparkDraftModel"]}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
Shapes = dict[str, tuple[int, ...]]
MARKOV: Shapes = {"markov_head.markov_w1.weight": (VOCAB, 3), "markov_head.markov_w2.weight": (VOCAB, 3)}
SURE: Shapes = {"confidence_head.proj.weight": (1, SIZE), "confidence_head.proj.bias": (1,)}
SURE_BY_TOKEN: Shapes = SURE | {"confidence_head.proj.weight": (1, SIZE + 3)}
GATE: Shapes = {"markov_head.gate_proj.weight": (3, SIZE + 3), "markov_head.gate_proj.bias": (3,)}
MEMORY: Shapes = {"markov_head.joint_proj.weight": (9, SIZE + 6), "markov_head.joint_proj.bias": (9,)}
TABLES: Shapes = {"embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
DFLASH2: Shapes = {
    "candidate_selector.predecessor_codebook": (VOCAB, 3),
    "candidate_selector.successor_codebook": (VOCAB, 3),
    "candidate_selector.hidden_projection.weight": (3, SIZE),
}
for part in ("attention_conv", "mlp_conv"):
    for layer in (0, 1):
        DFLASH2[f"layers.{layer}.{part}.base_kernel"] = (2, 3, SIZE)
        DFLASH2[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * 3 * 4, SIZE)
XPRESS: Shapes = {
    "refiner_head.token_embed.weight": (VOCAB, 3),
    "refiner_head.down_h.weight": (3, SIZE),
    "refiner_head.down_g.weight": (3, SIZE),
    "refiner_head.in_proj.weight": (3, 9),
    "refiner_head.mix_l": (3, 5, 5),
    "refiner_head.mlp_gate.weight": (6, 3),
    "refiner_head.mlp_up.weight": (6, 3),
    "refiner_head.mlp_down.weight": (3, 6),
    "refiner_head.readout.weight": (VOCAB, 3),
}
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 3, "markov_head_type": "vanilla", "num_anchors": 512}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Shapes]] = {
    "plain": ({}, {}, {}),
    "sliding": (SLIDING, {}, {}),
    "sliding without causality": (SLIDING | {"is_causal": False}, {}, {}),
    "sliding alone": (SLIDING | {"layer_types": ["sliding_attention"] * 2}, {}, {}),
    "causal": (SLIDING, {"causal": True}, {}),
    "scaled": ({}, {"input_embedding_scale": 3.0, "target_layer_ids": [-1, 2]}, {}),
    "from the anchor": ({}, {"sample_from_anchor": True}, {}),
    "dspark": (NAMED | {"block_size": 3}, DSPARK, MARKOV | SURE_BY_TOKEN),
    "dspark that is sure by itself": (NAMED, DSPARK, MARKOV | SURE),
    "dspark as DeepSpec has it": (DEEPSPEC, {}, MARKOV | TABLES),
    "dspark without confidence": (NAMED, DSPARK, MARKOV),
    "dspark with a gate": (NAMED, DSPARK | {"markov_head_type": "gated"}, MARKOV | GATE),
    "dspark with a memory": (NAMED, DSPARK | {"markov_head_type": "rnn"}, MARKOV | MEMORY),
    "dflash2": ({}, {"selector_top_k": 3, "is_causal": False}, DFLASH2),
    "xpress": ({}, {"num_jacobi_passes": 2}, XPRESS),
    "xpress from the anchor": ({}, {"num_jacobi_passes": 9, "sample_from_anchor": True}, XPRESS),
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {"fc.weight": (SIZE, 2 * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= layer_weights(prefix, config, SIZE) | {f"{prefix}input_layernorm.weight": (SIZE,)}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    return shapes


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, max_model_len=64))


def written(folder: Path, kind: str) -> tuple[str, dict[str, Any], Weights]:
    top, inner, more = KINDS[kind]
    config = CONFIG | top | {"dflash_config": CONFIG["dflash_config"] | inner}
    weights = random_weights(shapes_of(config) | more, seed=3)
    return write_head(folder / "head", config, weights), config, weights


def written_by_speculators(folder: Path, kind: str) -> tuple[str, dict[str, Any], Weights]:
    """The same for some of the target's tokens, in a container; the config is that of its authors."""
    _, config, weights = written(folder, kind)
    drafted = torch.tensor([0, 2, 3, 5, 8, 13])
    weights.setdefault("lm_head.weight", target().model.lm_head.weight.detach().float())
    for name in {"lm_head.weight", "markov_head.markov_w2.weight", "refiner_head.readout.weight"} & weights.keys():
        weights[name] = weights[name][drafted].contiguous()
    weights |= {"d2t": drafted - torch.arange(len(drafted)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    weights["t2d"][drafted] = True
    inner = config["dflash_config"]
    layers = {name: config[name] for name in config if name not in ("architectures", "dflash_config", "block_size")}
    container = {
        "speculators_model_type": kind if kind != "plain" else "dflash",
        "transformer_layer_config": layers | {"model_type": "qwen3"},
        "draft_vocab_size": len(drafted),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
        **{name: inner[name] for name in inner if name != "target_layer_ids"},
        "block_size": config["block_size"],
        "architectures": config["architectures"],
    }
    return write_head(folder / "container", container, weights), config, weights


def dense_mixed(w: Weights, part: str, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Each token of a block mixed with those before it, by weights of its own; and a function that mixes an output."""
    if (base := w.get(f"{part}base_kernel")) is None:
        return x, lambda out: out
    added = (x @ w[f"{part}kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], -1)
    kernels = base + torch.stack([added[..., i // (SIZE // added.shape[-1])] for i in range(SIZE)], -1)

    def convolved(x: torch.Tensor, half: int) -> torch.Tensor:
        taps = range(base.shape[1])
        return torch.stack([sum(kernels[i, half, tap] * x[i - tap] for tap in taps if tap <= i) for i in range(len(x))])

    return convolved(x, 0), lambda out: convolved(out, 1)


def dense_refined(
    w: Weights, hidden: torch.Tensor, base: torch.Tensor, before: list[int], passes: int, ids: Sequence[int]
) -> torch.Tensor:
    """`before` holds the token before the first slot's own, and the first slot's where that is no draft."""
    r = {name.removeprefix("refiner_head."): weight for name, weight in w.items() if "refiner_head." in name}
    logits = base
    for _ in range(passes):
        chosen = [ids[column] for column in logits.argmax(-1).tolist()]
        tokens = [*before, *chosen[len(before) - 1 :]][: len(base)]
        rows = list[torch.Tensor]()
        for slot, token in enumerate(tokens):
            read = [r["down_h.weight"] @ hidden[slot], r["down_g.weight"] @ hidden.mean(0)]
            rows.append(r["in_proj.weight"] @ torch.cat([*read, r["token_embed.weight"][token]]))
        mixed = [
            rows[slot] + sum(r["mix_l"][:, slot, other] * rows[other] for other in range(slot + 1))
            for slot in range(len(rows))
        ]
        x = torch.stack(mixed)
        gate = x @ r["mlp_gate.weight"].T
        x = x + (gate * gate.sigmoid() * (x @ r["mlp_up.weight"].T)) @ r["mlp_down.weight"].T
        logits = base + x @ r["readout.weight"].T
    return logits


def dense_block(w: Weights, config: dict[str, Any], context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Hidden states ``[B, SIZE]`` of a block with the embeddings `block`, after the hidden states `context` of all."""
    eps, start, end = config["rms_norm_eps"], len(context), len(context) + len(block)
    read, h = dense_rms(context @ w["fc.weight"].T, w["hidden_norm.weight"], eps), block
    for layer in range(config["num_hidden_layers"]):
        prefix, slides = f"layers.{layer}.", "sliding" in config.get("layer_types", ["full"] * 9)[layer]
        causal = config.get("is_causal", config["dflash_config"].get("causal", slides))

        def visible(query: int, slides: bool = slides, causal: bool = causal) -> slice:
            first = max(0, start + query - config["sliding_window"] + 1) if slides else 0
            return slice(first, start + query + 1 if causal else end)

        def mixed(part: str, x: torch.Tensor, prefix: str = prefix) -> Any:
            return dense_mixed(w, f"{prefix}{part}_conv.", x)

        normed = dense_rms(h, w[f"{prefix}input_layernorm.weight"], eps)
        h = dense_layer(w, prefix, config, h, normed, range(end), read, visible, mixed)
    return h


def dense_draft(weights: Weights, config: dict[str, Any], tokens: Sequence[int]) -> list[tuple[int, float]]:
    """The greedy draft after `tokens`, and how sure the drafter is of each token."""
    w = {name: weight.double() for name, weight in weights.items()}
    ids = range(VOCAB) if "d2t" not in weights else (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist()
    model, inner = target().model, config["dflash_config"]
    states = model(torch.tensor([[*tokens[:-1]]]), use_cache=False, output_hidden_states=True).hidden_states
    context = torch.cat([states[layer + 1][0] for layer in inner["target_layer_ids"]], dim=-1)
    block = [tokens[-1]] + [inner["mask_token_id"]] * (config["block_size"] - 1)
    embeds = w.get("embed_tokens.weight", model.get_input_embeddings().weight)[block]
    h = dense_block(w, config, context, embeds * inner.get("input_embedding_scale", 1.0))
    h = dense_rms(h, w["norm.weight"], config["rms_norm_eps"])
    base = h @ w.get("lm_head.weight", model.lm_head.weight).T
    from_anchor = inner.get("sample_from_anchor", "DSpark" in config["architectures"][0])
    if "refiner_head.mix_l" in w:
        first = [tokens[-1]] if from_anchor else [tokens[max(0, len(tokens) - 2)], tokens[-1]]
        base = dense_refined(w, h, base, first, inner["num_jacobi_passes"], ids)
    h, base = (slots[0 if from_anchor else 1 :] for slots in (h, base))
    drafted, before, memory = list[tuple[int, float]](), tokens[-1], torch.zeros(3, dtype=torch.float64)
    for slot, logits in zip(h, base, strict=True):
        if "markov_head.markov_w1.weight" in w:
            low = added = w["markov_head.markov_w1.weight"][before]
            if (proj := w.get("markov_head.gate_proj.weight")) is not None:
                added = low * (proj @ torch.cat([slot, low]) + w["markov_head.gate_proj.bias"]).sigmoid()
            if (proj := w.get("markov_head.joint_proj.weight")) is not None:
                joint = proj @ torch.cat([memory, low, slot]) + w["markov_head.joint_proj.bias"]
                memory = joint[:3].sigmoid() * memory + (1 - joint[:3].sigmoid()) * joint[3:6].tanh()
                added = joint[6:].tanh()
            logits = logits + w["markov_head.markov_w2.weight"] @ added
        if "candidate_selector.predecessor_codebook" in w:
            part = {name.removeprefix("candidate_selector."): weight for name, weight in w.items()}
            code = part["predecessor_codebook"][before] * (part["hidden_projection.weight"] @ slot)
            scores = logits + part["successor_codebook"][: len(logits)] @ code
            best = logits.topk(inner["selector_top_k"]).indices
            logits = torch.full_like(logits, -torch.inf).scatter(0, best, scores[best])
        before = ids[int(logits.argmax())]
        sure = float(logits.softmax(-1).max())
        if (proj := w.get("confidence_head.proj.weight")) is not None:
            read = slot if proj.shape[1] == SIZE else torch.cat([slot, low])
            sure = float(torch.sigmoid(proj[0] @ read + w["confidence_head.proj.bias"][0]))
        drafted.append((before, sure))
    return drafted


def load(path: str, backend: str = "ragged", **options: Any) -> Any:
    (spec,) = emssd_drafters()
    return spec.build(DFlashConfig(path=path, **options), context_of(target(), backend, continuous=backend == "ragged"))


@pytest.mark.parametrize(
    ("kind", "backend", "write"),
    [
        *((kind, "ragged", written) for kind in KINDS),
        *((kind, "padded", written) for kind in ("sliding", "causal")),
        *((kind, "ragged", written_by_speculators) for kind in ("plain", "dspark", "dflash2", "xpress")),
    ],
)
def test_every_draft_is_that_of_a_dense_pass(kind: str, backend: str, write: Any, tmp_path: Path) -> None:
    path, config, weights = write(tmp_path, kind)
    drafter = load(path, backend)
    propose, counts = drafter.propose, list[int]()

    def compared(batch: Any, budget: Any) -> Any:
        draft = propose(batch, budget)
        counts.append(sum(length > 0 for length in draft.lengths))
        for row, start, stop in zip(batch, draft.indptr, draft.indptr[1:], strict=False):
            if start < stop:
                tokens, sure = zip(*dense_draft(weights, config, row.tokens)[: stop - start], strict=True)
                assert tuple(draft.token_ids[start:stop].tolist()) == tokens
                assert draft.confidence[start:stop] == pytest.approx(sure, abs=1e-9)
        return draft

    drafter.propose = compared
    steps = {"max_step_tokens": 16} if backend == "ragged" else {}
    options = EngineOptions(batch_size=3, on_drafter_error=OnDrafterError.fail, **steps)
    engine = Engine.assemble(target(), None, drafter=drafter, backend=backend, budget="fixed", options=options)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, NUM_NEW, ignore_eos=True), strict=True):
        assert done.token_ids == tuple(greedy_reference(target().model, prompt, NUM_NEW))
    assert max(counts) == 3
    assert drafter._runner._backend.kv_usage.held == 0


def test_copies_of_the_targets_tables_take_no_memory(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": target().model.get_input_embeddings(), "lm_head.weight": target().model.lm_head}
    copies = {name: table.weight.detach().clone() for name, table in tables.items()}
    head = load(write_head(tmp_path / "head", CONFIG, random_weights(shapes_of(CONFIG)) | copies))._head
    assert head.embed_tokens is head.lm_head is None


def test_layers_that_no_config_names_are_spread_over_the_target(tmp_path: Path) -> None:
    unnamed = {name: value for name, value in CONFIG.items() if name != "dflash_config"}
    weights = random_weights(shapes_of(CONFIG))
    one_layer = {name: weight for name, weight in weights.items() if not name.startswith("layers.1.")}
    one_layer["fc.weight"] = one_layer["fc.weight"][:, :SIZE].contiguous()
    path = write_head(tmp_path / "one", unnamed | {"num_hidden_layers": 1, "mask_token_id": 3}, one_layer)
    assert load(path).hidden_layers == (3,)  # after layer 4 // 2
    path = write_head(tmp_path / "two", unnamed | {"mask_token_id": 3, "block_size": 4}, weights)
    with pytest.raises(ConfigError, match="outputs of layers 1, 1, and needs different ones"):  # as there are but four
        load(path)


FIRST = {"markov_head.markov_w1.weight": (VOCAB, 3)}


def inner(**values: Any) -> dict[str, Any]:
    return {"dflash_config": CONFIG["dflash_config"] | values}


REFUSALS: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = [
    ({"block_size": None}, {}, "its config.json has no block_size"),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, {}, "its config.json has no mask_token_id"),
    ({"dflash_config": [1]}, {}, "its dflash_config is no object of JSON"),
    ({"block_size": "many"}, {}, "a value of another type or size than expected"),
    (inner(mask_token_id=VOCAB), {}, f"the target has embeddings of {VOCAB} ids"),
    ({"vocab_size": 99}, {}, f"its vocabulary has 99 tokens, and the target's has {VOCAB}"),
    ({"hidden_size": 24}, {}, "it has a hidden size of 24, and the target's is 32; it was trained for another target"),
    ({"num_target_layers": 5}, {}, "trained for a target of 5 layers, and this one has 4"),
    (inner(target_layer_ids=[0, 4]), {}, "the target has layers 0 to 3"),
    ({"block_size": 10**9}, {}, "its block_size is 1000000000; a block drafts 1 to 4096 tokens"),
    ({"block_size": 1}, {}, "its block_size is 1; a block drafts 1 to 4096 tokens"),
    (inner(use_swa=True), {}, "no layer_types say which"),
    (
        {"speculators_model_type": "dflash", "transformer_layer_config": {"model_type": "mamba"}},
        {},
        "its layers are those of mamba",
    ),
    ({"speculators_model_type": "eagle3"}, {}, "what it holds is an EAGLE-3 head"),
    ({"num_hidden_layers": 3}, {}, "are missing"),
    ({}, {"candidate_selector.hidden_projection.weight": (2, 2)}, "candidate_selector.predecessor_codebook"),
    ({}, {"layers.0.mlp_conv.base_kernel": (2, 2, SIZE)}, "layers.0.mlp_conv.kernel_projection.weight is missing"),
    ({}, {"refiner_head.mix_l": (2, 5, 5)}, "refiner_head.token_embed.weight"),
    ({}, {"layers.0.extra.weight": (2, 2)}, "layers.0.extra.weight is without a place"),
    ({}, {"confidence_head.proj.weight": (1, SIZE + 3)}, "its confidence head reads a Markov head, and it has none"),
    (inner(markov_head_type="rnn"), MARKOV, "markov_head.joint_proj.weight is missing"),
    ({}, FIRST, "markov_head.markov_w2.weight is missing"),
    (inner(final_logit_softcapping=30.0), MARKOV, "it scales its logits by final_logit_softcapping 30.0, and"),
    (inner(output_multiplier=0.5), MARKOV, "it scales its logits by output_multiplier 0.5, and"),
    (inner(output_multiplier=-0.5), {}, "it scales its logits by output_multiplier -0.5, and"),
]


@looped("config, shapes, words", REFUSALS)
def test_wrong_files_are_refused_in_one_sentence(config: Any, shapes: Any, words: str, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", CONFIG | config, random_weights(shapes_of(CONFIG) | shapes))
    assert words in refusal(lambda: load(path))


def test_scaled_logits_have_the_same_likeliest_tokens_and_are_read_where_nothing_is_added(tmp_path: Path) -> None:
    config = CONFIG | inner(output_multiplier=0.5) | {"final_logit_softcapping": 30.0}
    load(write_head(tmp_path / "plain", config, random_weights(shapes_of(CONFIG))))
    neutral = CONFIG | inner(output_multiplier=1.0) | {"final_logit_softcapping": None}
    load(write_head(tmp_path / "markov", neutral, random_weights(shapes_of(CONFIG) | MARKOV)))


def test_more_tokens_than_a_block_drafts_are_refused(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, "plain")
    words = "drafter.num_speculative_tokens is 5; a block of this head drafts 4 at most"
    assert words in refusal(lambda: load(path, num_speculative_tokens=5))
