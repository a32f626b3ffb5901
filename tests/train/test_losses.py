"""Medusa heads and PARD models are trained on what they read while they draft: the logits of each depth are the same.

Oracle: the drafter, in float64, in an engine. And what always agrees with its target has nothing to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_medusa import MedusaConfig
from emssd_medusa.drafter import MedusaDrafter
from emssd_medusa.heads import MedusaHeads, load_medusa
from emssd_pard.drafter import PardDrafter
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import emssd_train.medusa
import emssd_train.pard
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters.heads.options import TreeKind
from emssd.drafters.heads.target import LAST_NORMED, TargetSizes
from emssd.model import CausalLMRunner, TargetModel
from emssd.plugins.registry import Registry
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference
from emssd_train.distance import choosable, divergence
from emssd_train.medusa import MedusaLoss, new_heads, save_heads
from emssd_train.options import MedusaOptions
from emssd_train.pard import Masked, PardLoss, with_mask
from emssd_train.teacher import Teacher
from tests.support.looking_back import DISTANCE, looking_back_model
from tests.support.looking_back import VOCAB as WORDS
from tests.support.perfect_head import VOCAB
from tests.support.perfect_medusa import NUM_HEADS, SIZE, lagging_target, write_perfect_medusa
from tests.support.right_drafters import LONG_PROMPTS
from tests.support.tiers import looped

DEPTH = 4
PROMPTS = [[3, 9, 4, 17, 30], [8], [5, 6], [11, 12, 13, 11, 12, 13, 11]]
Drafted = list[tuple[list[int], int, list[torch.Tensor]]]
"""Of each draft its row's tokens and its own, how many are its own, and the logits after each."""


def decode(model: TargetModel, drafter: Any) -> None:
    options = EngineOptions(batch_size=3, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(model, None, drafter=drafter, backend="ragged", budget="fixed", options=options)
    engine.generate(PROMPTS, 9, ignore_eos=True)


def watch(patch: pytest.MonkeyPatch, drafter: type, levels: Callable[[list[int]], list[list[torch.Tensor]]]) -> Drafted:
    """Collect the drafts of a drafter; `levels` gives the logits of each draft, by their lengths."""
    drafts, propose = Drafted(), drafter.propose  # type: ignore[attr-defined]  # any drafter's

    def noted(self: Any, batch: Any, budget: Any) -> Any:
        draft = propose(self, batch, budget)
        rows = [(list(row.tokens), place) for place, row in enumerate(batch) if draft.lengths[place]]
        found = levels([draft.lengths[place] for _, place in rows])
        for (tokens, place), logits in zip(rows, found, strict=True):
            own = draft.token_ids[draft.indptr[place] : draft.indptr[place + 1]].tolist()
            drafts.append((tokens + own, len(own), logits))
        return draft

    patch.setattr(drafter, "propose", noted)
    return drafts


def hold(drafts: Drafted, loss: nn.Module, module: Any, teacher: Teacher, known: torch.Tensor | None = None) -> None:
    """Assert that the loss compares a draft's own logits first if nothing counts before the draft.

    Args:
        drafts: see `watch`.
        loss: of what drafted.
        module: that has its code.
        teacher: of the loss.
        known: ids that can be drafted.
    """
    assert len(drafts) > 12
    assert {length for _, length, _ in drafts} >= {1, DEPTH}
    for tokens, length, found in drafts:
        compared = list[torch.Tensor]()

        def noted(is_: torch.Tensor, should: torch.Tensor, to: list[torch.Tensor] = compared) -> torch.Tensor:
            to.append(is_)
            return divergence(is_, should)

        newest, ids = len(tokens) - length - 1, torch.tensor([tokens])
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(module, "divergence", noted)
            loss(ids, torch.tensor([newest]), torch.tensor([len(tokens)]))
            counts = choosable(teacher(ids).logits, known)[0]
        if counts[newest : newest + length].all():
            assert len(compared) == length
            for is_, logits in zip(compared, found, strict=True):
                torch.testing.assert_close(is_[0], logits, rtol=1e-9, atol=1e-9)


def medusa_heads(model: TargetModel, folder: Path, **options: Any) -> MedusaHeads:
    """Random heads, saved as trained ones are."""
    chosen = MedusaOptions("m", "d", str(folder), depth=DEPTH, **options)
    size = chosen.draft_vocab_size
    heads = new_heads(chosen, model, None if size is None else list(range(61 - size, 61)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    folder.mkdir()
    save_heads(folder, heads, chosen, model, torch.float64)
    return heads


@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {}), ("opt", {"num_layers": 2, "draft_vocab_size": 58})], ids=str
)
def test_medusa_heads_are_trained_on_what_they_draft_with(
    architecture: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel(tiny_model(architecture))
    heads = medusa_heads(model, tmp_path / "heads", **options)
    given, forward = list[torch.Tensor](), MedusaHeads.forward

    def noted(*arguments: Any) -> torch.Tensor:
        given.append(forward(*arguments))
        return given[-1]

    with monkeypatch.context() as patch:
        patch.setattr(MedusaHeads, "forward", noted)
        drafts = watch(
            patch,
            MedusaDrafter,
            lambda lengths: [[*given[-1][:length, row]] for row, length in enumerate(lengths)],
        )
        decode(model, MedusaConfig(path=str(tmp_path / "heads"), tree=TreeKind.chain))
    teacher = Teacher(model, (LAST_NORMED,))
    hold(drafts, MedusaLoss(heads, teacher), emssd_train.medusa, teacher, heads.target_ids)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
def test_a_pard_model_is_trained_on_what_it_drafts_with(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TargetModel(tiny_model("llama"))
    draft, mask = with_mask(TargetModel(tiny_model(architecture, seed=1)))
    spec, given = draft.kv_cache_spec(3), list[torch.Tensor]()
    drafter = PardDrafter(
        CausalLMRunner(draft, make_backend(spec, "ragged", Registry())), model.vocab_size, mask, DEPTH
    )
    with monkeypatch.context() as patch:
        slots = PardDrafter.slots

        def noted(self: PardDrafter, rows: Any) -> torch.Tensor:
            logits = slots(self, rows)
            given[:] = logits.split([row.tree.depth for row in rows])
            return logits

        patch.setattr(PardDrafter, "slots", noted)
        drafts = watch(patch, PardDrafter, lambda lengths: [[*logits] for logits in given[: len(lengths)]])
        decode(model, drafter)
    teacher = Teacher(model, ())
    hold(drafts, PardLoss(draft, teacher, mask, DEPTH), emssd_train.pard, teacher)


def batch(model: TargetModel, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(prompt + greedy_reference(model.model, prompt, 14)) for prompt in prompts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "num_prompt": torch.tensor([len(prompt) for prompt in prompts]),
        "num_tokens": torch.tensor([len(row) for row in rows]),
    }


def losses_of_perfect_heads(folder: Path, shift: int = 0, layer: int = LAST_NORMED) -> torch.Tensor:
    model = TargetModel(lagging_target())
    loaded = load_medusa(write_perfect_medusa(folder), TargetSizes(VOCAB, SIZE, 1, torch.float64))
    loaded.head.heads = nn.ModuleList([*loaded.head.heads[shift:], *loaded.head.heads[:shift]])
    assert len(loaded.head.heads) == NUM_HEADS
    given = MedusaLoss(loaded.head, Teacher(model, (layer,)))(**batch(model, LONG_PROMPTS))
    return given["losses"]


def test_medusa_heads_that_are_always_right_have_no_loss(tmp_path: Path) -> None:
    assert losses_of_perfect_heads(tmp_path).max() < 1e-6


def test_with_another_place_or_another_state_they_have(tmp_path: Path) -> None:
    assert losses_of_perfect_heads(tmp_path / "place", shift=1).min() > 0.01
    assert losses_of_perfect_heads(tmp_path / "state", layer=1).min() > 0.01


def losses_of_a_perfect_model(depth: int = DISTANCE + 1, mask: int = WORDS + 2) -> torch.Tensor:
    model = TargetModel(looking_back_model())
    draft = TargetModel(looking_back_model(WORDS + 4, WORDS + 2))
    given = PardLoss(draft, Teacher(model, ()), mask, depth)(
        **batch(model, [[1, 3, 4, 6, 0, 7, 8, 3], [6, 1, 1, 5, 0, 2]])
    )
    return given["losses"]


def test_a_pard_model_that_is_always_right_has_no_loss() -> None:
    assert losses_of_a_perfect_model().max() < 1e-6


def test_where_it_cannot_see_what_comes_it_has() -> None:
    assert losses_of_a_perfect_model(DISTANCE + 2)[-1] > 0.01
    assert losses_of_a_perfect_model(mask=WORDS + 3)[1:].min() > 0.01


def test_with_masks_that_stand_one_further_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    states = Masked.states

    def shifted(self: Masked, model: TargetModel) -> torch.Tensor:
        place, self.place = self.place, self.place + (self.depth > 0)
        given = states(self, model)
        self.place = place
        return given

    monkeypatch.setattr(Masked, "states", shifted)
    assert losses_of_a_perfect_model()[1:].min() > 0.01


@pytest.mark.parametrize("kind", ["medusa", "pard"])
def test_only_what_may_be_drafted_counts(kind: str, tmp_path: Path) -> None:
    """Neither what is after the end of a text, nor its prompt and its first new token."""
    model = TargetModel(tiny_model("llama"))
    if kind == "medusa":
        heads = medusa_heads(model, tmp_path / "heads")
        loss: nn.Module = MedusaLoss(heads, Teacher(model, (LAST_NORMED,)))
    else:
        draft, mask = with_mask(TargetModel(tiny_model("llama", seed=1)))
        loss = PardLoss(draft, Teacher(model, ()), mask, DEPTH)
    text = torch.tensor([[3, 9, 4, 17, 30, 8, 5]])

    def losses(num_prompt: int, num_tokens: int, ids: torch.Tensor = text) -> torch.Tensor:
        with torch.no_grad():
            given: torch.Tensor = loss(ids, torch.tensor([num_prompt]), torch.tensor([num_tokens]))["losses"]
        return given

    padded = torch.cat([text, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(losses(3, 7), losses(3, 7, padded), rtol=1e-9, atol=1e-12)
    assert (losses(3, 7) > 0).tolist() == [True, True, True, False]  # tokens 4, 5 and 6; 5 and 6; and 6
    assert losses(6, 7).tolist() == [0, 0, 0, 0]
    longer = torch.cat([text, text], dim=1)
    both = loss(padded.repeat(2, 1), torch.tensor([5, 3]), torch.tensor([7, 7]))["losses"]
    first, second = losses(5, 7), losses(3, 7)
    torch.testing.assert_close(both[0], (first[0] + 3 * second[0]) / 4, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(losses(3, 7, longer), second, rtol=1e-9, atol=1e-12)


def test_new_heads_begin_as_the_targets_own_projection() -> None:
    model = TargetModel(tiny_model("llama"))
    heads = new_heads(MedusaOptions("m", "d", "o", depth=2, num_layers=2), model, [4, 7])
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = hidden @ model.model.get_output_embeddings().weight[[4, 7]].T
    torch.testing.assert_close(heads(hidden), wanted.expand(2, -1, -1), rtol=0, atol=0)


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
