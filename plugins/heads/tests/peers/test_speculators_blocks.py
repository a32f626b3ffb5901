"""DFlash and DSpark drafters that `speculators` saved draft in an engine what its own classes compute.

Run by `nox -s speculators`. float64. They are read from the containers in which `speculators` saved them. The layouts
of z-lab and DeepSpec, with the same tensors and another config, are tested beside the plugin.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.dflash import DFlashConfig, emssd_drafters
from emssd_heads.dflash.drafter import DFlashDrafter
from emssd_testing.models import tiny_model

from emssd.drafting import DrafterContext
from emssd.model import TargetModel
from tests.support.hidden import right_states
from tests.support.peers import all_double, choose_tokens, decode, randomize, speculated

speculators = pytest.importorskip("speculators", reason="nox -s speculators installs it")

VOCAB, LAYERS, BLOCK, MASK, RANK = 61, (3, 1), 5, 17, 6
DRAFTED = [0, 1, 3, *range(5, 30), 33, 60]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": VOCAB,
    "rope_theta": 500.0,
}
SLIDING = {  # longer than the texts: theirs is counted from the anchor, and not from each token of the block
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}


def made(folder: Path, verifier: Path, kind: str, layers: dict[str, Any], flags: dict[str, Any]) -> Any:
    """A drafter of theirs with random weights, read from the container in which they saved it."""
    from transformers import Qwen3Config

    config_of = speculators.SpeculatorModelConfig.registry[kind]
    config = config_of(
        transformer_layer_config=Qwen3Config(**(SHAPE | layers), attn_implementation="sdpa"),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(LAYERS),
        mask_token_id=MASK,
        speculators_config=speculated(kind, BLOCK - 1, verifier),
        **({"draft_vocab_size": VOCAB} | flags),
    )
    head = speculators.SpeculatorModel.registry[kind](config).double()
    randomize(head, seed=5)
    if head.use_draft_vocab:
        choose_tokens(head, DRAFTED, VOCAB)
    head.save_pretrained(folder)
    config = config_of.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex_attention compiles its masks
    opened = type(head).from_pretrained(str(folder), config=config, dtype=torch.float64).eval()
    if kind == "xpress":  # Transformers leaves this constant, which no file holds, without its values
        opened.refiner_head.causal_tril = torch.ones(BLOCK, BLOCK, dtype=torch.float64).tril()
    return opened


@torch.no_grad()
def their_draft(head: Any, target: TargetModel, tokens: list[int], drafted: list[int], kind: str) -> Any:
    """Logits ``[BLOCK, vocab]`` and confidences ``[BLOCK]`` of a block after `tokens` with these drafted tokens."""
    rest = [0] * (2 * BLOCK - len(drafted))  # anchors near the end are not taken
    text = torch.tensor([[*tokens, *drafted, *rest]])
    states = torch.cat(right_states(target.model, tokens[:-1], LAYERS), -1)
    states = torch.nn.functional.pad(states, (0, 0, 0, text.shape[1] - len(states)))[None]
    anchor = torch.zeros_like(text)
    anchor[0, len(tokens) - 1] = 1
    found = list[Any]()

    def noted(*given: Any, **more: Any) -> Any:
        found.append((given, more))
        return None, None

    with pytest.MonkeyPatch.context() as patch:  # what the loss is made of
        patch.setattr(importlib.import_module(f"speculators.models.{kind}.core"), "compute_metrics", noted)
        if kind == "dflash2":  # it scores the tokens among which it chooses, and not the one that is right
            patch.setattr(
                "speculators.models.dflash2.core.selector_training_candidates", lambda ids, right: (ids, None, None)
            )
        more = {"consistency_passes": head.config.num_jacobi_passes} if kind == "xpress" else {}
        last = states[..., : head.hidden_size]
        head(states, text, anchor, last, torch.zeros_like(text), max_anchors=1, **more)
    ((given, more),) = found
    if kind == "dflash2":
        impossible = torch.full_like(more["unary_logits"][0], -torch.inf)
        logits = impossible.scatter(-1, more["training_candidate_ids"][0], more["candidate_logits"][0])
    else:
        logits = given[1][-1][0] if kind == "xpress" else given[0][0]
    sure = given[2] if kind == "dspark" else None
    return logits, logits.softmax(-1).amax(-1) if sure is None else sure[0].sigmoid()


GATED = {"markov_rank": RANK, "markov_head_type": "gated"}
SELECTS = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 7}
KINDS = {
    "DFlash": ("dflash", {}, {}),
    "DFlash of some tokens": ("dflash", {}, {"draft_vocab_size": len(DRAFTED)}),
    "DFlash from the anchor": ("dflash", {}, {"sample_from_anchor": True}),
    "a causal layer": ("dflash", SLIDING, {}),
    "a sliding layer that is not causal": ("dflash", SLIDING, {"sliding_window_non_causal": True}),
    "DFlash2": ("dflash2", {}, SELECTS),
    "DFlash2 of sliding layers": ("dflash2", SLIDING, SELECTS | {"conv_kernel_size": 2}),
    "DSpark": ("dspark", {}, {"markov_rank": RANK}),
    "DSpark that is sure by itself": ("dspark", {}, {"markov_rank": RANK, "confidence_head_with_markov": False}),
    "DSpark with a gate": ("dspark", {}, GATED | {"draft_vocab_size": len(DRAFTED)}),
    "DSpark with a memory": ("dspark", {}, GATED | {"markov_head_type": "rnn"}),
    "DSpark without a table": ("dspark", {}, {"markov_rank": 0, "confidence_head_with_markov": False}),
    "XPress": ("xpress", {}, {"xpress_rank": RANK, "num_jacobi_passes": 2}),
    "XPress from the anchor": (
        "xpress",
        {},
        {"xpress_rank": RANK, "sample_from_anchor": True, "draft_vocab_size": len(DRAFTED)},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_their_drafters_draft_what_their_classes_compute(name: str, tmp_path: Path) -> None:
    kind, layers, flags = KINDS[name]
    target = TargetModel(tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB))
    target.model.save_pretrained(tmp_path / "verifier")
    with all_double():
        head = made(tmp_path / "container", tmp_path / "verifier", kind, layers, flags)
        path = str(tmp_path / "container")
        first = 0 if head.config.sample_from_anchor else 1
        ours = list[tuple[list[int], list[int], list[float], torch.Tensor]]()

        def load(context: DrafterContext) -> DFlashDrafter:
            (spec,) = emssd_drafters()
            drafter = spec.build(DFlashConfig(path=path), context)
            assert isinstance(drafter, DFlashDrafter)
            assert drafter.hidden_layers == LAYERS
            assert drafter.num_speculative_tokens == BLOCK - first
            propose, likely, logits = drafter.propose, drafter._likely, list[torch.Tensor]()

            def noted(values: torch.Tensor, nodes: Any) -> Any:
                logits.append(values)
                return likely(values, nodes)

            def proposed(batch: Any, budget: Any) -> Any:
                logits.clear()
                draft = propose(batch, budget)
                lengths = [stop - start for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)]
                if len(logits) > max(lengths, default=0):  # of all slots first, and then of each level
                    del logits[0]
                if len(logits) == 1:
                    by_row = list(logits[0].split([length for length in lengths if length]))
                else:
                    levels = [list(each) for each in logits]
                    by_row = [torch.stack([levels[at].pop(0) for at in range(length)]) for length in lengths if length]
                sure, left = draft.confidence or (), iter(by_row)
                for row, start, length in zip(batch, draft.indptr, lengths, strict=False):
                    if length:
                        tokens = draft.token_ids[start : start + length].tolist()
                        ours.append((list(row.tokens), tokens, list(sure[start : start + length]), next(left)))
                return draft

            drafter._likely = noted
            drafter.propose = proposed
            return drafter

        decode(target, load, num_new=12)
        assert len(ours) > 20
        for tokens, drafted, sure, logits in ours:
            wanted, confidence = their_draft(head, target, tokens, drafted, kind)
            wanted, confidence = (each[first : first + len(drafted)] for each in (wanted, confidence))
            torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
            ids = DRAFTED if head.use_draft_vocab else range(VOCAB)
            assert drafted == [ids[column] for column in wanted.argmax(-1).tolist()]
            torch.testing.assert_close(torch.tensor(sure, dtype=torch.float64), confidence, rtol=1e-9, atol=1e-9)
