"""Drafters are trained on what they read while they draft: training gives the logits of each depth that drafting gives.

Oracle: the drafter, in float64, in an engine. A drafter that always agrees with its target has nothing to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emssd_heads.training.eagle3
import emssd_heads.training.medusa
import emssd_heads.training.pard
import pytest
import torch
from emssd_heads import HeadRunner, PairedDrafter
from emssd_heads.config import LAST_NORMED, TargetSizes
from emssd_heads.eagle3 import Eagle3Config
from emssd_heads.eagle3.drafter import load_eagle3
from emssd_heads.eagle3.head import Eagle3Head
from emssd_heads.medusa import MedusaConfig
from emssd_heads.medusa.drafter import MedusaDrafter, load_medusa
from emssd_heads.options import TreeKind
from emssd_heads.pard.drafter import PardDrafter
from emssd_heads.residual import ResidualHeads
from emssd_heads.training.eagle3 import UnrolledLoss, head_config, new_head, save_head
from emssd_heads.training.medusa import MedusaLoss, new_heads, save_heads
from emssd_heads.training.options import Eagle3Options, MedusaOptions
from emssd_heads.training.pard import PardLoss, with_mask
from emssd_heads.training.shared import Teacher, choosable, divergence
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from tests.support.looking_back import DISTANCE, looking_back_model
from tests.support.looking_back import VOCAB as WORDS
from tests.support.peers import randomize
from tests.support.perfect_head import SIZE as HEAD_SIZE
from tests.support.perfect_head import VOCAB, perfect_target, write_perfect_eagle3
from tests.support.perfect_medusa import SIZE, lagging_target, write_perfect_medusa
from tests.support.right_drafters import LONG_PROMPTS

DEPTH, LAYERS = 4, (1, 2, 3)
PROMPTS = [[3, 9, 4, 17, 30], [8], [5, 6], [11, 12, 13, 11, 12, 13, 11]]
Drafted = list[tuple[list[int], int, list[torch.Tensor]]]
"""Of each draft its row's tokens and its own, how many are its own, and the logits after each."""


def decode(model: TargetModel, drafter: Any) -> None:
    options = EngineOptions(batch_size=3, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(model, None, drafter=drafter, backend="ragged", budget="fixed", options=options)
    engine.generate(PROMPTS, 12, ignore_eos=True)


def watch(patch: pytest.MonkeyPatch, drafter: type, levels: Callable[[list[int]], list[list[torch.Tensor]]]) -> Drafted:
    """Collect the drafts of a drafter; `levels` gives the logits of each draft, by their lengths."""
    drafts, propose = Drafted(), drafter.propose  # type: ignore[attr-defined]  # any drafter's

    def noted(self: Any, batch: Any, budget: Any) -> Any:
        draft = propose(self, batch, budget)
        chains = zip(batch, draft.token_ids.split(draft.lengths), strict=True)
        rows = [(list(row.tokens), chain.tolist()) for row, chain in chains if len(chain)]
        for (tokens, chain), logits in zip(rows, levels([len(chain) for _, chain in rows]), strict=True):
            drafts.append((tokens + chain, len(chain), logits))
        return draft

    patch.setattr(drafter, "propose", noted)
    return drafts


def watch_slots(patch: pytest.MonkeyPatch, drafter: Any) -> Drafted:
    """See `watch`; of a drafter that computes all levels at once."""
    levels, slots = list[torch.Tensor](), drafter.slots

    def noted(self: Any, rows: Any) -> torch.Tensor:
        logits: torch.Tensor = slots(self, rows)
        levels[:] = logits.split([row.tree.depth for row in rows])
        return logits

    patch.setattr(drafter, "slots", noted)
    return watch(patch, drafter, lambda lengths: [[*logits] for logits in levels[: len(lengths)]])


def hold(drafts: Drafted, loss: nn.Module, module: Any, teacher: Teacher, drafted: torch.Tensor | None = None) -> None:
    """Assert that a loss, with its code in `module`, compares the logits of drafts if nothing before them counts.

    Only the tokens `drafted` can be drafted.
    """
    assert {length for _, length, _ in drafts} >= {1, DEPTH}
    held = 0
    for tokens, length, found in drafts:
        compared = list[torch.Tensor]()

        def noted(logits: torch.Tensor, *wanted: Any, to: list[torch.Tensor] = compared) -> torch.Tensor:
            to += [logits] if len(logits) else []
            return divergence(logits, *wanted)

        newest, ids = len(tokens) - length - 1, torch.tensor([tokens])
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(module, "divergence", noted)
            loss(ids, torch.tensor([newest]), torch.tensor([len(tokens)]))
            counts = choosable(teacher(ids).logits, drafted)[0]
        if counts[newest : newest + length].all():
            held += 1
            assert len(compared) == length
            for is_, logits in zip(compared, found, strict=True):
                torch.testing.assert_close(is_[0], logits, rtol=1e-9, atol=1e-9)
    assert held > 12


def medusa_heads(model: TargetModel, folder: Path, drafted: list[int] | None = None, **options: Any) -> ResidualHeads:
    """Random heads, saved as trained ones are."""
    chosen = MedusaOptions("m", "d", str(folder), depth=DEPTH, **options)
    heads = new_heads(chosen, model, drafted)
    randomize(heads, seed=3)
    save_heads(folder, heads, chosen, model, torch.float64)
    return heads


def eagle3_head(model: TargetModel, folder: Path, drafted: list[int] | None = None, **options: Any) -> Eagle3Head:
    """A random head, saved as a trained one is."""
    size = None if drafted is None else len(drafted)
    chosen = Eagle3Options("m", "d", str(folder), depth=DEPTH, draft_vocab_size=size, **options)
    config = head_config(chosen, model, LAYERS)
    head = new_head(config, model, drafted, chosen)
    randomize(head, seed=3)
    save_head(folder, head, config, model.vocab_size, torch.float64)
    return head


def deep_model(architecture: str = "llama") -> TargetModel:
    return TargetModel(tiny_model(architecture, num_hidden_layers=3))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"num_layers": 2, "num_kv_heads": 2, "drafted": [*range(5, 59)]}),
        ("opt", {"share_lm_head": True, "drafted": [*range(5, 61)]}),
    ],
    ids=str,
)
def test_eagle3_heads_are_trained_on_what_they_draft_with(
    architecture: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep_model(architecture)
    head, given = eagle3_head(model, tmp_path, **options), list[Any]()

    def levels(lengths: list[int]) -> list[list[torch.Tensor]]:
        left = [iter(logits) for _, logits in given]  # of each pass the rows whose drafts are that long
        given.clear()
        return [[next(left[depth]) for depth in range(length)] for length in lengths]

    with monkeypatch.context() as patch:
        run = HeadRunner.run_to_logits
        patch.setattr(HeadRunner, "run_to_logits", lambda *step: given.append(run(*step)) or given[-1])
        drafts = watch(patch, PairedDrafter, levels)
        decode(model, Eagle3Config(path=str(tmp_path), tree=TreeKind.chain, depth=DEPTH))
    teacher = Teacher(model, LAYERS)
    hold(drafts, UnrolledLoss(head, teacher, DEPTH), emssd_heads.training.eagle3, teacher, head.target_ids)


@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {}), ("opt", {"num_layers": 2, "drafted": [*range(3, 61)]})], ids=str
)
def test_medusa_heads_are_trained_on_what_they_draft_with(
    architecture: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel(tiny_model(architecture))
    heads = medusa_heads(model, tmp_path, **options)
    with monkeypatch.context() as patch:
        drafts = watch_slots(patch, MedusaDrafter)
        decode(model, MedusaConfig(path=str(tmp_path), tree=TreeKind.chain))
    teacher = Teacher(model, (LAST_NORMED,))
    hold(drafts, MedusaLoss(heads, teacher), emssd_heads.training.medusa, teacher, heads.target_ids)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
def test_a_pard_model_is_trained_on_what_it_drafts_with(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TargetModel(tiny_model("llama"))
    draft, mask = with_mask(TargetModel(tiny_model(architecture, seed=1)))
    runner = CausalLMRunner(draft, make_backend(draft.kv_cache_spec(3), "ragged", Registry()))
    drafter = PardDrafter(runner, model.vocab_size, mask, DEPTH)
    with monkeypatch.context() as patch:
        drafts = watch_slots(patch, PardDrafter)
        decode(model, drafter)
    teacher = Teacher(model, ())
    hold(drafts, PardLoss(draft, teacher, mask, DEPTH), emssd_heads.training.pard, teacher)


def batch(model: TargetModel, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(prompt + greedy_reference(model.model, prompt, 14)) for prompt in prompts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "num_prompt": torch.tensor([len(prompt) for prompt in prompts]),
        "num_tokens": torch.tensor([len(row) for row in rows]),
    }


def test_only_medusa_heads_that_are_always_right_have_no_loss(tmp_path: Path) -> None:
    model = TargetModel(lagging_target())
    heads = load_medusa(write_perfect_medusa(tmp_path), TargetSizes(VOCAB, SIZE, 1, torch.float64)).head
    texts = batch(model, LONG_PROMPTS)
    assert MedusaLoss(heads, Teacher(model, (LAST_NORMED,)))(**texts)["losses"].max() < 1e-6
    assert MedusaLoss(heads, Teacher(model, (1,)))(**texts)["losses"].min() > 0.01  # other hidden states


def test_only_an_eagle3_head_that_is_always_right_has_no_loss(tmp_path: Path) -> None:
    model = TargetModel(perfect_target())
    head = load_eagle3(write_perfect_eagle3(tmp_path), TargetSizes(VOCAB, HEAD_SIZE, 3, torch.float64)).head
    texts = batch(model, [[1, 3, 4, 6], [6], [7, 8, 0]])
    assert UnrolledLoss(head, Teacher(model, LAYERS), DEPTH)(**texts)["losses"].max() < 1e-6
    others = Teacher(model, (0, 1, 2))  # other hidden states
    assert UnrolledLoss(head, others, DEPTH)(**texts)["losses"].min() > 0.01


def test_only_a_pard_model_that_is_always_right_has_no_loss() -> None:
    model, draft = TargetModel(looking_back_model()), TargetModel(looking_back_model(WORDS + 4, WORDS + 2))

    def losses(depth: int = DISTANCE + 1, mask: int = WORDS + 2) -> torch.Tensor:
        texts = batch(model, [[1, 3, 4, 6, 0, 7, 8, 3], [6, 1, 1, 5, 0, 2]])
        compared: torch.Tensor = PardLoss(draft, Teacher(model, ()), mask, depth)(**texts)["losses"]
        return compared

    assert losses().max() < 1e-6
    assert losses(DISTANCE + 2)[-1] > 0.01, "it cannot see what comes"
    assert losses(mask=WORDS + 3)[1:].min() > 0.01


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pard"])
def test_only_what_may_be_drafted_counts(kind: str, tmp_path: Path) -> None:
    """Neither what is after the end of a text, nor its prompt and its first new token."""
    model = deep_model()
    if kind == "eagle3":
        loss: nn.Module = UnrolledLoss(eagle3_head(model, tmp_path), Teacher(model, LAYERS), DEPTH)
    elif kind == "medusa":
        loss = MedusaLoss(medusa_heads(model, tmp_path), Teacher(model, (LAST_NORMED,)))
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


def test_places_whose_token_cannot_be_drafted_do_not_count(tmp_path: Path) -> None:
    model, text = deep_model(), torch.tensor([[3, 9, 4, 17, 30, 8, 5]])
    head, teacher = eagle3_head(model, tmp_path, drafted=[5]), Teacher(model, LAYERS)
    assert 5 not in teacher(text).logits.argmax(-1)
    assert UnrolledLoss(head, teacher, 1)(text, torch.tensor([1]), torch.tensor([7]))["losses"].tolist() == [0]
