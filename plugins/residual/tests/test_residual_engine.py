"""`residual` sampling through the engine: the target's law on the path that users run, and what would break it.

Two oracles: the law of a world of three tokens, enumerated through the stages of drafting and the verification of a
step; and `check_distribution` with plain logits, whose power is shown with faults that other engines had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from emssd_residual import rules as module
from emssd_residual.distributions import choose
from emssd_residual.law import check_distribution
from emssd_residual.rules import Verdict, verify_traversal
from emssd_testing.conformance.scripted import Decision, Life
from emssd_testing.conformance.watch import WatchedPolicy
from emssd_testing.conformance.worlds import PolicyWorld
from emssd_testing.drafters import ScriptedBudget, TreeDrafter
from emssd_testing.oracle import DenseBackend

from emssd.decoding.check import TIE_TOLERANCE
from emssd.decoding.choosing import drawn_nodes
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.rule import LawReport
from emssd.drafting.stages import DraftStages
from emssd.hooks.registry import Registry
from emssd.sampling import SamplingMethod, SamplingParams
from emssd.sampling.choice import scores_of
from emssd.sequences import Batch, Request, Row
from tests.sampling.test_engine import VOCAB, Expected, decode, make_engine, target
from tests.support.backends import runner_of
from tests.support.drawing import DrawingDrafter, SampledTree, even, joined, rsd_c
from tests.support.exact import Law, Model, TensorUniform, behind, continued, law_of, target_law
from tests.support.residual_cases import DRAFTS, TARGETS
from tests.support.sampling import kept_logits
from tests.support.tiers import only

WARM = SamplingParams(temperature=1.0, method=SamplingMethod.residual, seed=1)


def asked(number: int, params: SamplingParams, length: int = 40) -> list[Request]:
    return [Request(str(i), (i % VOCAB, 3), length, sampling=params) for i in range(number)]


def report_of(drafter: Drafter | Seq[Drafter], params: SamplingParams, number: int = 40) -> LawReport:
    """The check's report on the engine's tokens."""
    rows = asked(number, params)
    engine = make_engine(drafter, batch_size=64, max_step_tokens=512)
    done = list(engine.run(rows))
    assert sum(row.num_accepted for row in done) > 100
    return check_distribution(done, runner_of(target(), DenseBackend()), {row.request_id: Row(row) for row in rows})


# Right and wrong on the engine's path.

KINDS = {
    "warm": WARM,
    "hot": dataclasses.replace(WARM, temperature=2.0),
    "cool": dataclasses.replace(WARM, temperature=0.5),
    "top-p": dataclasses.replace(WARM, temperature=1.5, top_p=0.6),
    "top-k": dataclasses.replace(WARM, top_k=4),
    "penalties": dataclasses.replace(WARM, repetition_penalty=1.5, frequency_penalty=0.3),
}


@pytest.mark.parametrize("kind", only(KINDS, ci=["warm", "top-p", "penalties"]))
def test_tokens_have_the_targets_law(kind: str) -> None:
    report = report_of(DrawingDrafter(even(VOCAB), [2, 1]), KINDS[kind])
    assert report.metrics["num_tokens"] == 40 * 40
    assert report.metrics["num_impossible"] == 0
    assert report.metrics["p_value"] > 1e-3


def test_drafts_without_distributions_keep_it_too() -> None:
    params = dataclasses.replace(WARM, temperature=0.7)
    assert report_of(TreeDrafter(VOCAB, 8), params).metrics["p_value"] > 1e-3


def test_a_residual_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the accepted way is drawn from the target's distribution there, and not from what is left."""

    def from_target(probs: Any, q: Any, tokens: Any, parents: Any, uniform: Any) -> Verdict:
        path = verify_traversal(probs, q, tokens, parents, uniform).path
        return Verdict(path, choose(probs[path[-1] + 1 if path else 0], uniform()))

    monkeypatch.setattr(module, "verify_traversal", from_target)
    assert not report_of(DrawingDrafter(even(VOCAB), [1, 1]), WARM).is_right


def test_drafts_that_do_not_tell_the_truth_are_found() -> None:
    class Liar(DrawingDrafter):
        def tree(self, row: Row) -> SampledTree | None:
            tree = super().tree(row)
            if tree is not None:
                tree.draft = [q / 2 for q in tree.draft]
            return tree

    assert not report_of(Liar(even(VOCAB), [1, 1]), WARM).is_right


class Knowing(DrawingDrafter):
    """Knows the noise of coupled sampling, and drafts, with distributions, only where that would give token 3."""

    def tree(self, row: Row) -> SampledTree | None:
        node, logits = next(drawn_nodes(row, Draft.empty(1), 0)), kept_logits(target().model, tuple(row.tokens))
        return super().tree(row) if int(scores_of(torch.tensor([logits]), [node]).argmax()) == 3 else None


def test_a_drafter_that_knows_the_other_methods_noise_changes_nothing() -> None:
    rows = [Request(str(i), (3, 1, 4), 2, sampling=dataclasses.replace(WARM, temperature=2.0)) for i in range(300)]
    engine = make_engine(Knowing(even(VOCAB), [1]), batch_size=64, max_step_tokens=512)
    done = list(engine.run(rows))
    report = check_distribution(done, runner_of(target(), DenseBackend()), {row.request_id: Row(row) for row in rows})
    assert report.metrics["p_value"] > 1e-3


# The law of a small world, enumerated.

SHOWN, PROMPT = TARGETS["all possible"], (0,)


class Drawn(Drafter):
    """Draws with the numbers of an enumeration."""

    drafts_trees, num_speculative_tokens = True, 9

    def __init__(self, draft: Model, uniform: Callable[[], Any]) -> None:
        self._draft, self._uniform = draft, uniform

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        def told(tree: SampledTree, nodes: Seq[int]) -> list[torch.Tensor]:
            return [torch.tensor(q.astype(float)) for q in behind(self._draft)(tree, nodes)]

        trees = [rsd_c(told, (2, 1), self._uniform) for _ in batch]
        draft = joined(trees)
        sure = tuple(0.9 if token == 1 else 0.1 for token in draft.token_ids.tolist())
        draft = dataclasses.replace(draft, confidence=sure)
        return draft.cut([min(limit, length) for limit, length in zip(budget, draft.lengths, strict=True)])


def law_with(policy: BudgetPolicy, draft: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[Law, int]:
    """The law of what a step emits, and the most nodes that were verified."""
    sizes = set[int]()

    def step(uniform: Callable[[], Any]) -> tuple[int, ...]:
        batch = Batch((Row(Request("r", PROMPT, 9, sampling=WARM)),))
        drafting = DraftStages([CheckedDrafter(Drawn(draft, uniform), None, 3, on_error="fail")], deepcopy(policy))
        proposed = drafting.propose(batch, (9,), 0)
        texts = [list[int]()]
        for token, parent in zip(proposed.token_ids.tolist(), proposed.tree(0), strict=True):
            texts.append([*texts[parent + 1], token])
        logits = torch.stack([torch.tensor(SHOWN(text).astype(float)).log() for text in texts])
        monkeypatch.setattr(module, "uniforms", lambda *_: uniform)
        verified = module.ResidualRule().verify(logits, batch.rows, proposed)
        sizes.add(len(texts) - 1)
        return tuple(verified[0].new_tokens)

    return law_of(step, TensorUniform), max(sizes)


def differs(law: Law) -> float:
    """The largest difference of any text's probability from that of the target's own."""
    mine, its = continued(law, SHOWN, 3), target_law(SHOWN, 3)
    return max(abs(float(mine.get(text, 0)) - float(chance)) for text, chance in its.items())


@cache
def installed() -> dict[str, Callable[[], BudgetPolicy]]:
    specs = Registry().specs("budget")
    return {spec.name: lambda spec=spec: spec.build(spec.config()) for spec in specs}  # type: ignore[misc]


def policies() -> list[str]:
    return sorted({"adaptive", "fixed", *installed()})


def lives(seed: int) -> Iterator[Life]:
    draw = Random(seed)
    for name in "abc":
        script = tuple(
            Decision(9, draw.randint(1, 9), draw.randint(0, 4), draw.randrange(7), draw.randrange(8)) for _ in range(5)
        )
        yield Life(Request(name, (1, 2), 60), script)


def warmed(name: str) -> Iterator[BudgetPolicy]:
    """The policy as it is, and at two moments of its life, if then it drafts."""
    yield installed()[name]()
    for seed in (0, 1):
        policy = installed()[name]()
        PolicyWorld(WatchedPolicy(policy), 1, "confident trees").live([*lives(seed)])
        yield policy


@pytest.mark.parametrize("draft", ["all possible", "with zeros"])
@pytest.mark.parametrize("name", policies())
def test_no_policy_changes_the_law(name: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = list[int]()
    for policy in warmed(name):
        law, most = law_with(policy, DRAFTS[draft], monkeypatch)
        assert differs(law) < TIE_TOLERANCE[torch.float64]
        drafted.append(most)
    assert max(drafted) > 0


class ByToken(ScriptedBudget):
    """Drops all from the first token 1 on."""

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        rows = map(draft.tokens, range(draft.num_rows))
        return [row.index(1) if 1 in row else len(row) for row in rows]


class Deep(ByToken):
    """Lets trees be as deep as the last one's tokens allow."""

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        self.max_depth = super().trim(step, draft)[0]
        return draft.lengths


POLICIES = {
    "by token": ByToken([(9, 9)]),
    "deep": Deep([(9, 9)]),
    "fixed 3": FixedBudget(3, 1),
    "fixed 2": FixedBudget(2),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_policies_that_look_at_tokens_cannot(policy: BudgetPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    law, most = law_with(policy, DRAFTS["all possible"], monkeypatch)
    assert differs(law) < TIE_TOLERANCE[torch.float64]
    assert most > 0


# What else the engine must keep.


def test_other_rows_of_the_batch_get_the_tokens_that_they_get_alone() -> None:
    kinds = [
        WARM,
        None,
        dataclasses.replace(WARM, method=SamplingMethod.coupled),
        dataclasses.replace(WARM, temperature=0.0),
    ]
    rows = [Request(str(i), (3, 1, 4), 20, sampling=kind) for i, kind in enumerate(kinds)]
    done = decode(make_engine(DrawingDrafter(even(VOCAB), [2, 1]), batch_size=4), rows)
    assert {name: text for name, text in done.items() if name != "0"} == dict(Expected(rows[1:]))
    assert done["3"] == done["1"], "at temperature 0 the methods are one"


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize(("max_step_tokens", "max_tokens"), [(64, None), (3, None), (64, 160)])
def test_the_text_depends_on_the_seed_and_the_drafts_alone(
    batch_size: int, max_step_tokens: int, max_tokens: int | None
) -> None:
    rows = [dataclasses.replace(request, prompt_ids=(5, 2, 6, 1)) for request in asked(5, WARM, 30)]
    drafter = DrawingDrafter(even(VOCAB), [2, 1])
    expected = decode(make_engine(drafter, batch_size=5), rows)
    assert len(set(expected.values())) == 5
    engine = make_engine(drafter, batch_size=batch_size, max_step_tokens=max_step_tokens, max_tokens=max_tokens)
    assert decode(engine, rows) == expected


def test_drafters_are_told_what_was_emitted() -> None:
    heard = list[Outcome]()

    class Listening(DrawingDrafter):
        def observe(self, outcome: Outcome) -> None:
            heard.append(outcome)

    rows, drafter = asked(4, WARM, 20), Listening(even(VOCAB), [2, 2])
    done, by_name = decode(make_engine(drafter, batch_size=4), rows), {row.request_id: list[int]() for row in rows}
    for outcome in heard:
        ids = outcome.draft.token_ids.tolist()
        for row, name in enumerate(outcome.batch.request_ids):
            path, choices = outcome.accepted[row], outcome.target_ids[row]
            assert len(choices) == 1 + outcome.draft.lengths[row]
            emitted = [choices[index] for index in (0, *(node + 1 for node in path))]
            assert emitted[:-1] == [ids[outcome.draft.indptr[row] + node] for node in path]
            by_name[name] += emitted
    assert {name: tuple(tokens[:20]) for name, tokens in by_name.items()} == done
