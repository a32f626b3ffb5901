"""A P-EAGLE head that `speculators` saved drafts in an engine what its own class computes for whole texts.

Run by `nox -s speculators`. float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.eagle3 import Eagle3Config, emssd_drafters
from emssd_heads.eagle3.drafter import ParallelDrafter
from emssd_heads.options import TreeKind
from emssd_heads.training.eagle3 import head_config, new_head, save_head, unroll
from emssd_heads.training.options import Eagle3Options
from emssd_testing.models import tiny_model

from emssd.drafting import DrafterContext
from emssd.model import TargetModel
from tests.support.hidden import right_states
from tests.support.peers import all_double, choose_tokens, decode, randomize, speculated

speculators = pytest.importorskip("speculators", reason="nox -s speculators installs it")

VOCAB, LAYERS, DEPTH, MASK = 61, (1, 2, 3), 4, 17
DRAFTED = [0, 1, 3, *range(5, 30), 33, 60]
SHAPE = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 10, "vocab_size": VOCAB}


def save_theirs(folder: Path, verifier: Path, kind: str, layers: dict[str, Any], flags: dict[str, Any]) -> None:
    """Save a head of theirs with random weights."""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from transformers import AutoConfig

    config = PEagleSpeculatorConfig(
        transformer_layer_config=AutoConfig.for_model(kind, **(SHAPE | layers)),
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        mask_token_id=MASK,
        speculators_config=speculated("peagle", DEPTH, verifier),
        **flags,
    )
    head = PEagleDraftModel(config).double()
    randomize(head, seed=3)
    if flags["draft_vocab_size"] < VOCAB:
        choose_tokens(head, DRAFTED, VOCAB)
    head.save_pretrained(folder)


@torch.no_grad()
def their_logits(head: Any, target: TargetModel, text: tuple[int, ...], patch: pytest.MonkeyPatch) -> torch.Tensor:
    """``[n, DEPTH, draft_vocab]`` after the first ``n`` pairs of a text, and after the masks that follow each."""
    num_pairs, padding = len(text) - 1, DEPTH
    anchors = torch.arange(num_pairs).repeat(DEPTH)  # all rollouts, where training draws some
    depths = torch.arange(DEPTH).repeat_interleave(num_pairs)
    patch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (anchors, depths))
    patch.setattr("speculators.models.peagle.core.compute_metrics", lambda **_: (None, None))  # of the loss
    found = list[torch.Tensor]()
    hook = head.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits))
    states = torch.cat(right_states(target.model, text[:-1], LAYERS), -1)
    states = torch.nn.functional.pad(states, (0, 0, 0, padding))[None]  # masks reach beyond the text
    tokens = torch.tensor([[*text[1:], *[0] * padding]])
    head(states, tokens, torch.zeros_like(tokens), verifier_last_hidden_states=states[..., : head.hidden_size])
    hook.remove()
    return found[0][0].unflatten(0, (DEPTH, num_pairs)).transpose(0, 1)


@pytest.mark.parametrize(
    ("kind", "layers", "flags"),
    [
        ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 2}, {"draft_vocab_size": len(DRAFTED)}),
        (
            "qwen3",
            {"num_hidden_layers": 2, "num_key_value_heads": 1, "rope_theta": 500.0},
            {"draft_vocab_size": VOCAB, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
        ),
        (
            "qwen3",
            {
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            {"draft_vocab_size": len(DRAFTED), "norm_before_fc": True},
        ),
    ],
    ids=["llama", "qwen3 of two layers", "a sliding window"],
)
def test_a_head_of_theirs_drafts_what_their_class_computes(
    kind: str, layers: dict[str, Any], flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB))
    verifier, folder = tmp_path / "verifier", tmp_path / "head"
    target.model.save_pretrained(verifier)
    save_theirs(folder, verifier, kind, layers, flags)
    ours = list[tuple[tuple[int, ...], torch.Tensor]]()
    slots = ParallelDrafter.slots

    def noted(self: ParallelDrafter, rows: Any) -> torch.Tensor:
        logits = slots(self, rows)
        pairs = zip(rows, logits.split([row.tree.depth for row in rows]), strict=True)
        ours.extend((tuple(row.tokens), own) for row, own in pairs)
        return logits

    monkeypatch.setattr(ParallelDrafter, "slots", noted)

    def load(context: DrafterContext) -> ParallelDrafter:
        (spec,) = emssd_drafters()
        drafter = spec.build(Eagle3Config(path=str(folder), tree=TreeKind.chain, depth=DEPTH), context)
        assert isinstance(drafter, ParallelDrafter)
        assert drafter.hidden_layers == LAYERS
        ids = torch.tensor(DRAFTED if flags["draft_vocab_size"] < VOCAB else range(VOCAB))
        assert torch.equal(drafter._head.to_target(torch.arange(len(ids))), ids)
        return drafter

    with all_double():
        texts = decode(target, load, num_new=12)
        head = speculators.SpeculatorModel.from_pretrained(str(folder), dtype=torch.float64).eval()
        assert type(head).__name__ == "PEagleDraftModel"
        theirs = {text: their_logits(head, target, text, monkeypatch) for text in texts}
    assert len(ours) > 20
    for tokens, logits in ours:
        (whole,) = (text for text in texts if text[: len(tokens)] == tokens)
        wanted = theirs[whole][len(tokens) - 2, : len(logits)]
        torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
    assert max(len(logits) for _, logits in ours) == DEPTH


EAGLE3_LAYERS, NUM_PASSES, NUM_TOKENS = (1, 2, 3), 3, 128  # as many as a block of their masks


@pytest.mark.parametrize(
    "options",
    [{"draft_vocab_size": 24}, {"num_layers": 2, "num_kv_heads": 2, "intermediate_size": 20}],
    ids=["fewer tokens", "two layers"],
)
def test_it_opens_a_head_and_gives_its_logits(options: dict[str, Any], tmp_path: Path) -> None:
    target = TargetModel(tiny_model("llama", num_hidden_layers=3))
    verifier, folder = tmp_path / "verifier", tmp_path / "head"
    target.model.save_pretrained(verifier)
    chosen = Eagle3Options(str(verifier), "d", str(folder), **options)
    config = head_config(chosen, target, EAGLE3_LAYERS)
    drafted = list(range(5, 5 + options["draft_vocab_size"])) if "draft_vocab_size" in options else None
    head = new_head(config, target, drafted, chosen)
    randomize(head, seed=3)
    generator = torch.Generator().manual_seed(4)
    folder.mkdir()
    save_head(folder, head, config, target.vocab_size, torch.float64)

    theirs = speculators.SpeculatorModel.from_pretrained(str(folder)).double().eval()
    assert type(theirs).__name__ == "Eagle3DraftModel"
    size = config["transformer_layer_config"]["hidden_size"]
    hidden = torch.randn(1, NUM_TOKENS, len(EAGLE3_LAYERS) * size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(target.vocab_size, (1, NUM_TOKENS), generator=generator)
    with torch.no_grad():
        theirs.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        found = list[torch.Tensor]()
        theirs.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits))
        with all_double():
            theirs(hidden, tokens, torch.zeros_like(tokens), ttt_steps=NUM_PASSES)
        embeds = target.model.get_input_embeddings()(tokens)
        passes = unroll(head, embeds, head.features(hidden[0]).unsqueeze(0), NUM_PASSES)
        for step, (outputs, logits) in enumerate(zip(passes, found, strict=True)):
            ours = head.logits(outputs[0, step:], pytest.fail)  # the pair that their column of this pass has gone on to
            torch.testing.assert_close(ours, logits[0, : NUM_TOKENS - step], rtol=1e-9, atol=1e-9)
