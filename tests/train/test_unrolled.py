"""A head is trained on what it will read while it drafts: pass by pass, training gives the logits that drafting gives.

Oracle: the drafter, in float64, in an engine. And a head that always agrees with its target has nothing to learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_eagle3 import Eagle3Config
from emssd_eagle3.head import Eagle3Head
from emssd_eagle3.loading import load_eagle3
from torch.nn.utils.rnn import pad_sequence

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters import HeadLane, PairedDrafter
from emssd.drafters.heads.options import TreeKind
from emssd.drafters.heads.target import TargetSizes
from emssd.model import TargetModel
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference
from emssd_train.eagle3 import UnrolledLoss, default_layers, head_config, new_head, save_head, unroll
from emssd_train.options import Eagle3Options
from emssd_train.shared import Teacher
from emssd_train.texts import Text, frequent_tokens
from tests.support.perfect_head import SIZE, VOCAB, perfect_target, write_perfect_eagle3
from tests.support.tiers import looped

DEPTH, LAYERS = 4, (1, 2, 3)
PROMPTS = [[3, 9, 4, 17, 30], [8], [5, 6], [11, 12, 13, 11, 12, 13, 11]]


def target(architecture: str) -> TargetModel:
    return TargetModel(tiny_model(architecture, num_hidden_layers=3))


def head_in(folder: Path, model: TargetModel, **options: Any) -> Eagle3Head:
    """A random head whose every part matters, saved as a trained one is."""
    chosen = Eagle3Options("m", "d", str(folder), depth=DEPTH, **options)
    drafted = None if chosen.draft_vocab_size is None else list(range(5, 5 + chosen.draft_vocab_size))
    config = head_config(chosen, model, LAYERS)
    head = new_head(config, model, drafted, chosen)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))
    folder.mkdir()
    save_head(folder, head, config, model.vocab_size, torch.float64)
    return head


class Watched:
    """Computations of a drafter: for each draft its row's tokens, the drafted tokens, and the logits after each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], list[torch.Tensor]]] = []
        propose, run_to_logits, levels = PairedDrafter.propose, HeadLane.run_to_logits, list[torch.Tensor]()

        def noted_logits(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, logits = run_to_logits(*arguments)
            levels.append(logits)
            return hidden, logits

        def noted_propose(drafter: Any, batch: Any, budget: Any) -> Any:
            levels.clear()
            draft = propose(drafter, batch, budget)
            places = [0] * len(levels)
            for row, sequence in enumerate(batch):
                tokens = draft.token_ids[draft.indptr[row] : draft.indptr[row + 1]].tolist()
                found = [levels[depth][places[depth]] for depth in range(len(tokens))]
                for depth in range(len(tokens)):
                    places[depth] += 1
                if tokens:
                    self.drafts.append((list(sequence.tokens) + tokens, found))
            return draft

        patch.setattr(PairedDrafter, "propose", noted_propose)
        patch.setattr(HeadLane, "run_to_logits", noted_logits)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"num_layers": 2, "num_kv_heads": 2, "draft_vocab_size": 30}),
        ("opt", {"share_lm_head": True, "draft_vocab_size": 40}),
    ],
    ids=str,
)
def test_each_pass_gives_the_logits_that_drafting_gives(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = target(architecture)
    head = head_in(tmp_path / "head", model, **options)
    engine = Engine.assemble(
        model,
        None,
        drafter=Eagle3Config(path=str(tmp_path / "head"), tree=TreeKind.chain, depth=DEPTH),
        backend="ragged",
        budget="fixed",
        options=EngineOptions(batch_size=3, on_drafter_error=OnDrafterError.fail),
    )
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        engine.generate(PROMPTS, 12, ignore_eos=True)
    drafts = watched.drafts
    assert len(drafts) > 20
    assert {len(found) for _, found in drafts} >= {1, DEPTH}
    teacher = Teacher(model, LAYERS)
    lesson = teacher(pad_sequence([torch.tensor(tokens) for tokens, _ in drafts], batch_first=True))
    with torch.no_grad():
        features = head.features(lesson.hidden[:, :-1])
        passes = list(unroll(head, lesson.embeds[:, 1:], features, DEPTH))
        for row, (tokens, found) in enumerate(drafts):
            last = len(tokens) - len(found) - 2  # the pair whose second half is the row's newest token
            for step, logits in enumerate(found):
                outputs = passes[step][row, last + step].unsqueeze(0)
                is_ = head.logits(outputs, teacher.borrowed.project)[0]
                torch.testing.assert_close(is_, logits, rtol=1e-9, atol=1e-9)


def perfect(tmp_path: Path, layers: tuple[int, ...] = LAYERS) -> tuple[UnrolledLoss, dict[str, torch.Tensor]]:
    """The loss of a head that its target always agrees with, and a batch of texts."""
    model = TargetModel(perfect_target())
    sizes = TargetSizes(VOCAB, SIZE, 3, torch.float64)
    head = load_eagle3(write_perfect_eagle3(tmp_path), sizes).head
    prompts = [[1, 3, 4, 6], [6], [7, 8, 0]]
    rows = [torch.tensor(prompt + greedy_reference(model.model, prompt, 14)) for prompt in prompts]
    batch = {
        "input_ids": pad_sequence(rows, batch_first=True),
        "num_prompt": torch.tensor([len(prompt) for prompt in prompts]),
        "num_tokens": torch.tensor([len(row) for row in rows]),
    }
    return UnrolledLoss(head, Teacher(model, layers), DEPTH), batch


def test_a_head_that_is_always_right_has_no_loss_in_any_pass(tmp_path: Path) -> None:
    loss, batch = perfect(tmp_path)
    assert loss(**batch)["losses"].max() < 1e-6


def test_with_other_hidden_states_it_has(tmp_path: Path) -> None:
    loss, batch = perfect(tmp_path, (0, 1, 2))
    assert loss(**batch)["losses"].min() > 0.01


def test_only_what_may_be_drafted_counts(tmp_path: Path) -> None:
    """Neither what is after the end of a text, nor its prompt and its first new token."""
    model = target("llama")
    teacher = Teacher(model, LAYERS)
    head = head_in(tmp_path / "head", model)
    loss = UnrolledLoss(head, teacher, 2)
    text = torch.tensor([[3, 9, 4, 17, 30, 8, 5]])

    def losses(num_prompt: int, num_tokens: int, ids: torch.Tensor = text) -> torch.Tensor:
        return loss(ids, torch.tensor([num_prompt]), torch.tensor([num_tokens]))["losses"]

    padded = torch.cat([text, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(losses(3, 7), losses(3, 7, padded), rtol=1e-9, atol=1e-12)
    one, two = losses(5, 7), losses(4, 7)  # tokens 6, and 5 and 6; and of the second pass none, and token 6
    assert one[1] == 0
    assert one[0] > 0
    assert two[1] > 0
    lesson = teacher(text)
    with torch.no_grad():
        (outputs,) = unroll(head, lesson.embeds[:, 1:], head.features(lesson.hidden[:, :-1]), 1)
        is_ = head.logits(outputs[0, 4:5], teacher.borrowed.project).log_softmax(-1)
    should = lesson.logits[0, 5:6].log_softmax(-1)
    torch.testing.assert_close(one[0], (should.exp() * (should - is_)).sum(), rtol=1e-9, atol=1e-12)
    assert losses(6, 7).tolist() == [0, 0]


def test_places_whose_token_cannot_be_drafted_do_not_count(tmp_path: Path) -> None:
    model = target("llama")
    head = head_in(tmp_path / "head", model, draft_vocab_size=1)
    text = torch.tensor([[3, 9, 4, 17, 30, 8, 5]])
    assert 5 not in Teacher(model, LAYERS)(text).logits.argmax(-1)
    loss = UnrolledLoss(head, Teacher(model, LAYERS), 1)(text, torch.tensor([1]), torch.tensor([7]))
    assert loss["losses"].tolist() == [0]


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
