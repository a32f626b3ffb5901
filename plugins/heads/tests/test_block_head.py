"""Each draft of a running engine is that of one dense pass over the whole row, written out from the published formulas.

float64; the target's hidden states are those of Transformers, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing.oracle import greedy_reference

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from tests.support.block_heads import KINDS, SIZE, VOCAB, contained, load, target, written
from tests.support.heads import Weights, dense_layer, dense_rms

NUM_NEW = 14
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3, 9, 9, 2, 1], [6], [7, 8, 3]]


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


@pytest.mark.parametrize(
    ("kind", "backend", "write"),
    [
        *((kind, "ragged", written) for kind in KINDS),
        *((kind, "padded", written) for kind in ("sliding", "causal")),
        *((kind, "ragged", contained) for kind in ("plain", "dspark", "dflash2", "xpress")),
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
