"""A head from here is one of `speculators`: its own class opens the files and computes the same logits.

Run by `nox -s speculators`. float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from emssd.model import TargetModel
from emssd.testing.models import tiny_model
from emssd_train.eagle3 import head_config, new_head, save_head, unroll
from emssd_train.options import Eagle3Options
from tests.support.peers import all_double

speculators = pytest.importorskip("speculators", reason="nox -s speculators installs it")

LAYERS, NUM_PASSES, NUM_TOKENS = (1, 2, 3), 3, 128  # as many as a block of their masks


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
    config = head_config(chosen, target, LAYERS)
    drafted = list(range(5, 5 + options["draft_vocab_size"])) if "draft_vocab_size" in options else None
    head = new_head(config, target, drafted, chosen)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))
    folder.mkdir()
    save_head(folder, head, config, target.vocab_size, torch.float64)

    theirs = speculators.SpeculatorModel.from_pretrained(str(folder)).double().eval()
    assert type(theirs).__name__ == "Eagle3DraftModel"
    size = config["transformer_layer_config"]["hidden_size"]
    hidden = torch.randn(1, NUM_TOKENS, len(LAYERS) * size, generator=generator, dtype=torch.float64)
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
