"""DFlash and DSpark drafters that `speculators` saved draft in an engine what its own classes compute.

Run by `nox -s speculators`. float64. They are laid out as z-lab and DeepSpec publish theirs: a container of
`speculators` has the same tensors, with another config.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_dflash import DFlashConfig
from emssd_dflash.drafter import DFlashDrafter
from safetensors.torch import load_file

from emssd.drafting import DrafterContext
from emssd.model import TargetModel
from emssd.testing.models import tiny_model
from tests.support.heads import write_head
from tests.support.hidden import right_states
from tests.support.peers import all_double, decode, randomize

speculators = pytest.importorskip("speculators", reason="nox -s speculators installs it")

VOCAB, LAYERS, BLOCK, MASK, RANK = 61, (3, 1), 5, 17, 6
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
TABLES = (("model.", "embed_tokens.weight"), ("", "lm_head.weight"))
SLIDING = {  # longer than the texts: theirs is counted from the anchor, and not from each token of the block
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}


def made(folder: Path, verifier: Path, kind: str, layers: dict[str, Any], flags: dict[str, Any]) -> Any:
    """A drafter of theirs with random weights, read from the container in which they saved it."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    config_of = speculators.SpeculatorModelConfig.registry[kind]
    config = config_of(
        transformer_layer_config=Qwen3Config(**(SHAPE | layers), attn_implementation="sdpa"),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(LAYERS),
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(verifier)),
        ),
        **flags,
    )
    head = speculators.SpeculatorModel.registry[kind](config).double()
    randomize(head, seed=5)
    head.save_pretrained(folder)
    config = config_of.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex_attention compiles its masks
    return type(head).from_pretrained(str(folder), config=config, dtype=torch.float64).eval()


def as_published(container: Path, verifier: Path, folder: Path, kind: str) -> str:
    """The drafter of a container in the layout of z-lab, or in that of DeepSpec, which has the target's tables."""
    saved = json.loads((container / "config.json").read_text())
    layers = SHAPE | {name: each for name, each in saved["transformer_layer_config"].items() if name in SLIDING}
    weights, whole = load_file(container / "model.safetensors"), load_file(verifier / "model.safetensors")
    inner: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]}
    if kind == "dflash":
        config = {"architectures": ["DFlashDraftModel"], "dflash_config": inner | {"block_size": BLOCK}}
        inner = {"is_causal": False} if saved["sliding_window_non_causal"] else {}
    else:
        config = {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "num_anchors": 512}
        weights |= {name: whole[f"{of}{name}"] for of, name in TABLES}
        inner |= {name: saved[name] for name in saved if name.startswith(("markov_", "confidence_", "enable_"))}
    return write_head(folder, layers | config | inner, weights)


@torch.no_grad()
def their_draft(head: Any, target: TargetModel, tokens: list[int], drafted: list[int], kind: str) -> Any:
    """Of one block behind `tokens`, given what was drafted: logits ``[BLOCK, vocab]`` and confidences ``[BLOCK]``."""
    rest = [0] * (2 * BLOCK - len(drafted))  # anchors near the end are not taken
    text = torch.tensor([[*tokens, *drafted, *rest]])
    states = torch.cat(right_states(target.model, tokens[:-1], LAYERS), -1)
    states = torch.nn.functional.pad(states, (0, 0, 0, text.shape[1] - len(states)))[None]
    anchor = torch.zeros_like(text)
    anchor[0, len(tokens) - 1] = 1
    found = list[Any]()

    def noted(logits: torch.Tensor, targets: torch.Tensor, third: torch.Tensor, *others: Any, **more: Any) -> Any:
        found.append((logits[0], third[0].sigmoid()))
        return None, None

    with pytest.MonkeyPatch.context() as patch:  # what the loss is made of
        patch.setattr(importlib.import_module(f"speculators.models.{kind}.core"), "compute_metrics", noted)
        head(states, text, anchor, states[..., : head.hidden_size], torch.zeros_like(text), max_anchors=1)
    ((logits, sure),) = found
    return logits, sure if kind == "dspark" else logits.softmax(-1).amax(-1)


@pytest.mark.parametrize(
    ("kind", "layers", "flags"),
    [
        ("dflash", {}, {}),
        ("dflash", SLIDING, {}),
        ("dflash", SLIDING, {"sliding_window_non_causal": True}),
        ("dspark", {}, {"markov_rank": RANK}),
        ("dspark", {}, {"markov_rank": RANK, "confidence_head_with_markov": False}),
    ],
    ids=["DFlash", "a causal layer", "a sliding layer that is not causal", "DSpark", "DSpark that is sure by itself"],
)
def test_their_drafters_draft_what_their_classes_compute(
    kind: str, layers: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    target = TargetModel(tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB))
    target.model.save_pretrained(tmp_path / "verifier")
    with all_double():
        head = made(tmp_path / "container", tmp_path / "verifier", kind, layers, flags)
        path = as_published(tmp_path / "container", tmp_path / "verifier", tmp_path / "head", kind)
        ours = list[tuple[list[int], list[int], list[float], torch.Tensor]]()

        def load(context: DrafterContext) -> DFlashDrafter:
            drafter = DFlashDrafter.load(DFlashConfig(path=path), context)
            assert drafter.hidden_layers == LAYERS
            assert drafter.num_speculative_tokens == (BLOCK if kind == "dspark" else BLOCK - 1)
            propose, project, logits = drafter.propose, drafter._target.project, list[torch.Tensor]()

            def noted(hidden: torch.Tensor) -> torch.Tensor:
                logits.append(project(hidden))
                return logits[-1]

            def proposed(batch: Any, budget: Any) -> Any:
                draft = propose(batch, budget)
                sure, rows = draft.confidence or (), zip(batch, draft.indptr, draft.indptr[1:], strict=False)
                for row, start, stop in rows:
                    if start < stop:
                        tokens, own = draft.token_ids[start:stop].tolist(), logits[-1][start:stop]
                        ours.append((list(row.tokens), tokens, list(sure[start:stop]), own))
                return draft

            drafter._target.project = noted
            drafter.propose = proposed
            return drafter

        decode(target, load, num_new=12)
        assert len(ours) > 20
        for tokens, drafted, sure, logits in ours:
            wanted, confidence = their_draft(head, target, tokens, drafted, kind)
            first = 0 if kind == "dspark" else 1
            wanted, confidence = (each[first : first + len(drafted)] for each in (wanted, confidence))
            if kind == "dspark":
                before = torch.tensor([tokens[-1], *drafted[:-1]])
                logits = logits + head.markov_head.markov_w2(head.markov_head.markov_w1(before))
            torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
            assert drafted == wanted.argmax(-1).tolist()
            torch.testing.assert_close(torch.tensor(sure, dtype=torch.float64), confidence, rtol=1e-9, atol=1e-9)
