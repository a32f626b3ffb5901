"""A layer for multi-token prediction drafts as `speculators` computes, from the same checkpoint.

Run by `nox -s speculators`. float64. Its classes know the layout of Qwen3-Next, and take targets of Qwen3's kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads import PairedDrafter
from emssd_heads.mtp import MtpConfig, emssd_drafters
from emssd_heads.mtp.head import MtpHead
from emssd_heads.options import TreeKind
from emssd_testing.models import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from emssd.drafting import DrafterContext
from emssd.model import TargetModel
from tests.support.heads import causal, layer_weights, random_weights
from tests.support.peers import all_double, decode

speculators = pytest.importorskip("speculators", reason="nox -s speculators installs it")

NUM_STEPS = 3


def checkpoint(folder: Path) -> TargetModel:
    """A target whose checkpoint has such a layer, under the names of Qwen3-Next."""
    model = tiny_model("qwen3")
    model.save_pretrained(folder)
    size, values = model.config.hidden_size, model.config.to_dict()
    shapes = {f"mtp.{name}.weight": (size,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {"mtp.fc.weight": (size, 2 * size), "mtp.layers.0.input_layernorm.weight": (size,)}
    shapes |= layer_weights("mtp.layers.0.", values, size)
    shapes |= {f"mtp.layers.0.self_attn.{name}_norm.weight": (values["head_dim"],) for name in "qk"}
    weights = {name: each.double() for name, each in random_weights(shapes, seed=6).items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | weights, file, {"format": "pt"})
    return TargetModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


def opened(folder: Path) -> Any:
    """Their model with that layer, which reads checkpoints in the default dtype."""
    from speculators.models.mtp import MTPDraftModel

    torch.set_default_dtype(torch.float64)
    try:
        head = MTPDraftModel.from_training_args(
            AutoConfig.from_pretrained(folder), num_speculative_steps=NUM_STEPS, verifier_name_or_path=str(folder)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    return head.eval()


@pytest.mark.parametrize("in_container", [False, True], ids=["the target's checkpoint", "their container"])
@torch.no_grad()
def test_it_drafts_what_their_model_computes(
    in_container: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their later passes read what theirs gave for each place of a text, and see no pair of the first. So does ours."""
    ours = list[tuple[tuple[int, ...], torch.Tensor]]()
    catch_up, heads = PairedDrafter.catch_up, list[MtpHead]()

    def noted(self: PairedDrafter, rows: Any) -> Any:
        logits = catch_up(self, rows)
        ours.extend(zip((tuple(row.tokens) for row in rows), logits, strict=True))
        return logits

    def load(context: DrafterContext) -> PairedDrafter:
        (spec,) = emssd_drafters()
        drafter = spec.build(MtpConfig(path=str(path), tree=TreeKind.chain, depth=NUM_STEPS), context)
        assert isinstance(drafter, PairedDrafter)
        assert isinstance(drafter._head, MtpHead)
        heads.append(drafter._head)
        return drafter

    monkeypatch.setattr(PairedDrafter, "catch_up", noted)
    with all_double():
        target = checkpoint(tmp_path)
        head, path = opened(tmp_path), tmp_path
        if in_container:
            path = tmp_path / "container"
            head.save_pretrained(path)
        texts = decode(target, load, num_new=12)
        model, (own,) = target.model, heads
        theirs = dict[tuple[int, ...], torch.Tensor]()
        for text in texts:
            tokens = torch.tensor([[*text, *[0] * NUM_STEPS]])
            states = model.model(tokens).last_hidden_state  # after the final norm
            passes, _, _ = head(tokens, states)
            theirs[text] = passes[0][0]
            num_pairs = passes[0].shape[1]
            places, fed = torch.arange(num_pairs)[None], states[:, :num_pairs]
            for step, logits in enumerate(passes):
                embeds = model.get_input_embeddings()(tokens[:, step + 1 : step + 1 + num_pairs])
                fed = own(torch.cat([embeds, fed], -1), places, causal)
                torch.testing.assert_close(own.logits(fed[0], model.lm_head), logits[0], rtol=1e-9, atol=1e-9)
    assert len(ours) > 20
    for known, logits in ours:
        (whole,) = (text for text in texts if text[: len(known)] == known)
        torch.testing.assert_close(logits, theirs[whole][len(known) - 2], rtol=1e-9, atol=1e-9)
