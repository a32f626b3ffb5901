"""New drafters begin with certain weights, layers and tokens."""

from __future__ import annotations

from typing import Any

import torch
from emssd_heads.training.eagle3 import default_layers
from emssd_heads.training.medusa import new_heads
from emssd_heads.training.options import MedusaOptions
from emssd_heads.training.pard import with_mask
from emssd_heads.training.texts import Text, frequent_tokens
from emssd_testing.models import tiny_model

from emssd.model import TargetModel
from tests.support.tiers import looped


def test_new_heads_begin_as_the_targets_own_projection() -> None:
    model = TargetModel(tiny_model("llama"))
    heads = new_heads(MedusaOptions("m", "d", "o", depth=2, num_layers=2), model, [4, 7])
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = hidden @ model.model.get_output_embeddings().weight[[4, 7]].T
    for head in range(2):
        torch.testing.assert_close(heads(head, hidden), wanted, rtol=0, atol=0)


@looped("tied", [True, False])
def test_a_mask_is_a_new_token_unless_there_is_one(tied: bool) -> None:
    model: Any = tiny_model("llama", tie_word_embeddings=tied)
    before = model.get_input_embeddings().weight.detach().clone()
    draft, mask = with_mask(TargetModel(model))
    assert (mask, draft.vocab_size, draft.model.config.pard_token) == (61, 62, 61)
    after = draft.model.get_input_embeddings().weight
    torch.testing.assert_close(after[:61], before, rtol=0, atol=0)
    torch.testing.assert_close(after[61], before.mean(0))
    assert (after is draft.model.get_output_embeddings().weight) == tied
    again, same = with_mask(draft)
    assert (again, same) == (draft, 61)


@looped(
    "num_layers, chosen",
    [(32, (2, 16, 29)), (8, (2, 4, 5)), (6, (1, 3, 6)), (3, (1, 2, 3)), (2, (0, 1, 2)), (1, (0, 1))],
)
def test_hidden_layers_by_default(num_layers: int, chosen: tuple[int, ...]) -> None:
    assert default_layers(num_layers) == chosen


def test_the_most_frequent_new_tokens_are_drafted() -> None:
    texts = [Text((7, 7, 7), (4, 1, 4)), Text((7,), (1, 6, 4))]
    assert frequent_tokens(texts, 9, 3) == [1, 4, 6]
    assert frequent_tokens(texts, 9, 5) == [0, 1, 2, 4, 6]
    assert frequent_tokens(texts, 9, 9) is None
    assert frequent_tokens(texts, 9, None) is None
