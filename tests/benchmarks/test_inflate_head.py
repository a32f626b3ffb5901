"""A head that was made for a large target, out of one for a small target, drafts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_eagle3.loading import load_eagle3
from safetensors.torch import load_file
from torch.nn.functional import pad

from emssd.drafters import TargetSizes
from emssd.model import TargetModel
from emssd.testing.models import tiny_model
from emssd_train.eagle3 import head_config, new_head, save_head, unroll
from emssd_train.options import Eagle3Options
from tests.support.heads import write_head

SMALL, WIDE = TargetSizes(61, 16, 4), 24


@pytest.mark.parametrize("num_drafted", [20, None])
@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("vocab_size", [61, 150])
def test_it_drafts_the_same(load: Any, tmp_path: Path, num_drafted: int | None, borrows: bool, vocab_size: int) -> None:
    target = TargetModel(tiny_model("llama", num_hidden_layers=4, hidden_size=16, tie_word_embeddings=False))
    options = Eagle3Options("m", "d", str(tmp_path), draft_vocab_size=num_drafted, share_lm_head=borrows)
    drafted = None if num_drafted is None else list(range(3, 3 + num_drafted))
    config = head_config(options, target, (1, 2, 4))
    save_head(tmp_path, new_head(config, target, drafted, options), config, SMALL.vocab_size, torch.float32)
    tables = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight.detach().float(),
        "lm_head.weight": target.model.get_output_embeddings().weight.detach().float(),
    }
    small = load_eagle3(str(tmp_path), SMALL)
    sizes = TargetSizes(vocab_size, WIDE, 12)
    weights = load_file(tmp_path / "model.safetensors")
    made = load("inflate_head").inflated(config, weights, tables, SMALL, sizes)
    large = load_eagle3(write_head(tmp_path / "large", *made), sizes)
    assert large.layers == (3, 6, 12)

    ids, hidden = torch.randint(3, 61, (2, 9)), torch.randn(2, 9, 3, SMALL.hidden_size)
    wide = pad(hidden, (0, WIDE - SMALL.hidden_size))
    outputs = []
    for head, states in ((small.head, hidden), (large.head, wide)):
        embeds = head.embed(ids, lambda tokens: tables["embed_tokens.weight"][tokens])
        passes = unroll(head, embeds, head.features(states.flatten(2)), 2)
        outputs.append([head.logits(each.flatten(0, 1), lambda x: x @ tables["lm_head.weight"].T) for each in passes])
    for want, got in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    best = outputs[0][0].argmax(-1)
    assert torch.equal(large.head.to_target(best), small.head.to_target(best))
