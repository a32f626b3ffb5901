"""Each layout is read as it is published, and drafts what the formulas say, whole texts computed anew. float64."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emssd_heads.config import TargetSizes
from emssd_heads.loading import TargetWeights
from emssd_heads.mtp.loading import load_mtp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from emssd import Engine
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget, TargetModel
from tests.support.heads import (
    Weights,
    assert_ragged,
    assert_same,
    changed,
    dense_rms,
    new_folder,
    refusal,
    run_ragged,
    write_head,
)
from tests.support.peers import all_double
from tests.support.tiers import looped

VOCAB, SIZE, NUM_LAYERS = 23, 16, 2
LAYER = f"model.layers.{NUM_LAYERS}."
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"], "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm4_moe", EXPERTS | {"use_qk_norm": True}),
    "deepseek": ("deepseek_v3", EXPERTS | LATENT),
    "qwen": ("qwen3", {}),  # the layout of Qwen3-Next
    "qwen3_next": ("qwen3_next", LINEAR | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                                           "shared_expert_intermediate_size": 12}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
}  # fmt: skip
EXTRA = {"enorm": (SIZE,), "hnorm": (SIZE,), "eh_proj": (SIZE, 2 * SIZE), "shared_head.norm": (SIZE,)}
MTP_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


class Made(NamedTuple):
    """A checkpoint: its folder, the same with its layer as an ordinary last one, and what that does not have."""

    path: str
    longer: Any
    extra: Weights


@cache
def made(kind: str, own_tables: bool = False) -> Made:
    """A random checkpoint. Its further layer was written by Transformers, as one more of the model's own."""
    model_type, more = KINDS[kind]
    folder = new_folder()
    config = AutoConfig.for_model(model_type, **(COMMON | more), num_hidden_layers=NUM_LAYERS + 1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        longer: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        for name, weight in [*longer.named_parameters(), *longer.named_buffers()]:
            if "rotary" not in name:
                weight.data = torch.randn(weight.shape).to(weight.dtype) * 0.4 + (1.0 if "norm" in name else 0.0)
        extra = {
            name: torch.randn(shape, dtype=torch.float64) * 0.4 + ("norm" in name) for name, shape in EXTRA.items()
        }
        if own_tables:
            extra |= {
                "shared_head.head": torch.randn(VOCAB, SIZE).double(),
                "embed_tokens": torch.randn(VOCAB, SIZE).double(),
            }
    longer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"{LAYER}{name}.weight": weight.clone() for name, weight in extra.items()}
    if not own_tables:  # as most files have them: copies
        weights[f"{LAYER}shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{LAYER}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    if kind.startswith("qwen"):
        weights = {_as_mtp(name): weight for name, weight in weights.items() if "shared_head.head" not in name}
        weights = {name: weight for name, weight in weights.items() if name != "mtp.layers.0.embed_tokens.weight"}
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": NUM_LAYERS}
    values |= {name: values[name][:NUM_LAYERS] for name in ("layer_types", "mlp_layer_types") if values.get(name)}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Made(str(folder), longer, extra)


def _as_mtp(name: str) -> str:
    part = name.removeprefix(LAYER)
    new = MTP_NAMES.get(part.removesuffix(".weight"))
    return name if part == name else f"mtp.layers.0.{part}" if new is None else f"mtp.{new}.weight"


@cache
def target(kind: str, own_tables: bool = False) -> TargetModel:
    path = made(kind, own_tables).path
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.config._experts_implementation = "eager"  # the references run it, and there is no grouped product in float64
    return TargetModel(model)


def lent(kind: str, own_tables: bool = False) -> TargetWeights:
    model = target(kind, own_tables)
    sizes = TargetSizes(VOCAB, SIZE, NUM_LAYERS, model.dtype)
    return TargetWeights(
        BorrowedTarget(model), sizes, model.kv_cache_spec(4), lambda spec: pytest.fail("no cache is needed")
    )


def naive(head: Made, inputs: torch.Tensor) -> torch.Tensor:
    """Compute by formula, for pairs ``[n, 2 * SIZE]``, ``[n, SIZE]``. The layer is Transformers', on whole texts."""
    embeds, features = inputs.chunk(2, dim=-1)
    plus = float(head.longer.config.model_type in ("qwen3_next", "qwen3_5_text"))  # whose norms multiply by 1 + w
    enorm, hnorm, norm = (head.extra[name] + plus for name in ("enorm", "hnorm", "shared_head.norm"))
    halves = dense_rms(embeds, enorm, 1e-5), dense_rms(features, hnorm, 1e-5)
    fused = (torch.cat(halves, -1) @ head.extra["eh_proj"].T)[None]
    model, places = head.longer, torch.arange(len(inputs))[None]
    model.config._attn_implementation, model.config._experts_implementation = "eager", "eager"
    mask = torch.full((len(inputs), len(inputs)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    out = model.model.layers[NUM_LAYERS](
        fused, attention_mask=mask, position_ids=places, position_embeddings=model.model.rotary_emb(fused, places)
    )
    return dense_rms(out[0], norm, 1e-5)


@looped("backend", ["ragged", "padded"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_pieces_and_trees_are_as_the_formulas_say(kind: str, backend: str) -> None:
    head = load_mtp(made(kind).path, lent(kind)).head
    generator = torch.Generator().manual_seed(3)

    def pairs(count: int) -> torch.Tensor:
        return torch.randn(count, 2 * SIZE, generator=generator, dtype=torch.float64)

    rows = [
        (pairs(5), 2, pairs(4), (-1, -1, 0, 2)),
        (pairs(9), 6, pairs(3), (-1, 0, 0)),
        (pairs(2), 1, pairs(1), (-1,)),
    ]
    assert_ragged(head, rows, partial(naive, made(kind)), backend, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["glm", "deepseek"])
@torch.inference_mode()
def test_tables_are_the_targets_where_they_are_copies_and_their_own_where_not(kind: str) -> None:
    shared = load_mtp(made(kind).path, lent(kind))
    assert shared.head.lm_head is shared.head.embed_tokens is None
    assert "embeddings the target’s, vocabulary projection the target’s" in shared.described
    whole, borrowed = load_mtp(made(kind, True).path, lent(kind, True)), lent(kind, True).target
    assert "embeddings its own, vocabulary projection its own" in whole.described
    ids, extra = torch.tensor([3, 1, 22]), made(kind, True).extra
    assert torch.equal(whole.head.embed(ids, borrowed.embed), extra["embed_tokens"][ids])
    hidden = torch.randn(4, SIZE, dtype=torch.float64)
    assert torch.allclose(whole.head.logits(hidden, borrowed.project), hidden @ extra["shared_head.head"].T)


def broken(kind: str, folder: Path, change: Any = None, **config: Any) -> str:
    """A copy of a checkpoint, with the tensors that `change` gives, and this config."""
    path = Path(made(kind).path)
    weights = load_file(path / "model.safetensors")
    weights = weights if change is None else changed(weights, change(weights))
    return write_head(folder, json.loads((path / "config.json").read_text()) | config, weights)


def without(part: str) -> Any:
    return lambda w: {name: None for name in w if name.startswith(LAYER + part)}


def eh_proj(change: Any, layer: str = LAYER) -> Any:
    return lambda w: {f"{layer}eh_proj.weight": change(w[f"{LAYER}eh_proj.weight"]).contiguous()}


def moved(weights: Weights) -> Any:
    layer = {name: weight for name, weight in weights.items() if name.startswith(LAYER)}
    return dict.fromkeys(layer) | {name.replace(f".{NUM_LAYERS}.", ".5."): weight for name, weight in layer.items()}


@looped(
    "change, config, words",
    [
        (without("hnorm"), {}, "hnorm.weight is missing"),
        (lambda w: {f"{LAYER}hnrom.weight": torch.ones(1)}, {}, "model.layers.2.hnrom.weight is without a place"),
        (without("shared_head.norm"), {}, "norm.weight is missing"),
        (without("self_attn.o_proj"), {}, "block.self_attn.o_proj.weight is missing"),
        (without("mlp.experts.3.up_proj"), {}, "it should have 4 experts of three weights; 1 lack"),
        (without(""), {}, "what it holds is a language model; what is wanted is a model with layers for multi-token"),
        (eh_proj(lambda w: w[:, 1:]), {}, "model.layers.2.eh_proj.weight (16x31 in place of 16x32) is of another"),
        (eh_proj(torch.clone, "model.layers.3."), {}, "it has 2 layers for multi-token prediction; drafter=mtp drafts"),
        (moved, {}, "is number 5; this target's would be 2"),
        (eh_proj(lambda w: w.to(torch.float8_e4m3fn)), {}, "its weights are quantized (model.layers.2.eh_proj.weight)"),
        (None, {"hidden_size": 32}, "it has a hidden size of 32, and the target's is 16"),
        (None, {"vocab_size": 24}, "its vocabulary has 24 tokens, and the target's has 23"),
        (None, {"mtp_hidden_states_first": True}, "it puts hidden states before embeddings"),
        (
            None,
            {"speculators_model_type": "mtp", "transformer_layer_config": {"hidden_size": "wide"}},
            "Transformers does not take its transformer_layer_config",
        ),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(change: Any, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(lambda: load_mtp(broken("glm", tmp_path, change, **config), lent("glm")))
    assert message.startswith("cannot load the trained head ")
    assert words in message


def test_a_target_whose_layers_are_of_another_make_is_refused(tmp_path: Path) -> None:
    from emssd_testing.models import tiny_model

    model = TargetModel(tiny_model("opt", vocab_size=VOCAB, hidden_size=SIZE, word_embed_proj_dim=SIZE))
    other = TargetWeights(
        BorrowedTarget(model), TargetSizes(VOCAB, SIZE, 2), model.kv_cache_spec(1), lambda spec: pytest.fail("no")
    )
    with pytest.raises(ConfigError, match="OPTDecoderLayer, have no rotary positions"):
        load_mtp(made("glm").path, other)


@pytest.mark.parametrize("kind", ["glm", "deepseek"])
@torch.inference_mode()
def test_it_gives_what_transformers_computes_that_opens_the_same_checkpoint(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers counts pairs from 1, which turns queries and keys alike."""
    from transformers import modeling_layers

    if not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of Transformers has no layers for multi-token prediction")
    model, head = target(kind).model, load_mtp(made(kind).path, lent(kind)).head
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"layers\.{NUM_LAYERS}\."])  # published: 61
    theirs: Any = modeling_layers.MtpModel.from_pretrained(model).double().eval()
    theirs.config._experts_implementation = "eager"
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with all_double():
        states = model.model(tokens).last_hidden_state[:, :-1]
        places = torch.arange(1, tokens.shape[1])[None]
        wanted = theirs.forward_layer(0, states, places, None, input_ids=tokens[:, 1:])[0]
        inputs = torch.cat([head.embed(tokens[0, 1:], model.get_input_embeddings()), states[0]], -1)
        for length in range(2, len(inputs) + 1):
            ((last, _, _),) = run_ragged(head, [(inputs[:length], 1, inputs[:1], (-1,))])
            assert_same(last, wanted[length - 1])


def test_a_target_without_the_layer_is_refused_as_the_target() -> None:
    with pytest.raises(ConfigError, match=r"without drafter\.path, drafter=mtp takes the target's own layer: "):
        Engine.from_pretrained("demo", drafter="mtp")
