"""A drafter that fails costs speed, and never output: it is named, switched off, and told what to forget.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_cascade import CascadeConfig
from emssd_llma import LLMADrafter
from emssd_testing.models import tiny_model
from emssd_union import UnionConfig

from emssd import Engine
from emssd.drafting import Draft, Drafter, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import ConfigError, PluginError, PluginWarning
from emssd.sequences import Batch, Row
from tests.support.oracle import build
from tests.support.tiers import looped

NAME = "'bad' (emssd-bad 1.2)"


class MuteError(Exception):
    def __str__(self) -> str:
        sys.exit(0)

    __repr__ = __str__


def fails(error: BaseException) -> Any:
    raise error


def late_tree(drafter: Drafter, budget: Seq[int]) -> Draft:
    drafter.drafts_trees = True
    return Draft.from_trees([(1, -1), (2, -1)][:limit] for limit in budget)


def parents_of(parent: Any) -> Callable[[Drafter, Seq[int]], Draft]:
    """Chains whose nodes all have this parent."""

    def draft(drafter: Drafter, budget: Seq[int]) -> Draft:
        chains = Draft.from_chains([1, 2][:limit] for limit in budget)
        return Draft(chains.token_ids, chains.indptr, parents=(parent,) * chains.indptr[-1])

    return draft


def wants(name: str, number: Any) -> Callable[[Drafter, Seq[int]], Draft]:
    return lambda drafter, budget: setattr(drafter, name, number) or Draft.empty(len(budget))


def drafted(tensor: Any, *ends: int) -> Callable[[Drafter, Seq[int]], Draft]:
    """A draft of these ids for two rows."""
    return lambda drafter, budget: Draft(tensor, (0, *ends))


ONES = torch.ones(2, dtype=torch.int64)
# A fault of propose, or of another method, and the message that it gives.
FAULTS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "propose": (lambda *_: 1 / 0, r"failed in propose: ZeroDivisionError: division by zero"),
    "observe": (None, r"failed in observe: ZeroDivisionError: of its own"),
    "release": (None, r"failed in release: ZeroDivisionError: of its own"),
    "no draft": (lambda *_: None, "it returned a NoneType; return an emssd.drafting.Draft"),
    "no tensor": (drafted([1], 1, 1), "its token_ids are a list; give one int64 tensor"),
    "exit in propose": (lambda *_: sys.exit(0), r"failed in propose: SystemExit: 0"),
    "mute": (lambda *_: fails(MuteError()), "failed in propose: MuteError: no message, as that raises SystemExit"),
    "talks": (
        lambda *_: fails(ValueError(200_000 * "x")), r"failed in propose: ValueError: x{600} …\Z|x{600} …\. It is"
    ),
    "count": (
        wants("num_speculative_tokens", 2.5), "its num_speculative_tokens is 2.5; it must be an integer, at least 0"
    ),
    "candidates": (wants("num_candidates", -1), "its num_candidates is -1; it must be an integer, at least 0"),
    "late tree": (late_tree, "it drafted a token tree for request .*, and its drafts_trees is False"),
    "dtype": (drafted(ONES.int(), 1, 2), "its token_ids are torch.int32"),
    "meta": (drafted(ONES.to("meta"), 1, 2), "its token_ids are on the device meta"),
    "budget": (
        lambda drafter, budget: Draft.from_chains([[1] * (limit + 1) for limit in budget]),
        r"it drafted \d tokens for request '\d' with a budget of \d",
    ),
    "vocabulary": (
        lambda drafter, budget: Draft.from_chains([[11][:limit] for limit in budget]),
        "it drafted token id 11, outside the target's vocabulary of 11",
    ),
    "sparse": (drafted(ONES.to_sparse(), 1, 2), "failed in propose: RuntimeError: "),
    "rows": (drafted(ONES[:0], 0, 0, 0), "its draft has 3 rows .* but the batch has 2 rows"),
    "indptr": (drafted(ONES[:1], 2, 1), "broke its interface"),
    "half a parent": (parents_of(-0.5), "failed in propose: TypeError: .float. object"),
    "no parent": (parents_of(None), "failed in propose: TypeError: .NoneType. object"),
    "tree": (parents_of(0), "node 0 of its tree for request .* has parent 0; a parent is an earlier node"),
}  # fmt: skip


class Faulty(Drafter):
    """Drafts two tokens, until at step `due` it commits a fault."""

    num_speculative_tokens = 4

    def __init__(self, fault: str, due: int = 3) -> None:
        self.fault, self.due = fault, due
        self.num_proposed = self.num_observed = 0
        self.released: list[str] = []

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.num_proposed += 1
        fault = FAULTS[self.fault][0] if self.num_proposed == self.due else None
        return Draft.from_chains([[1, 2][:limit] for limit in budget]) if fault is None else fault(self, budget)

    def observe(self, outcome: Outcome) -> None:
        self.num_observed += 1
        if self.fault == "observe" and self.num_observed == self.due:
            raise ZeroDivisionError("of its own")

    def release(self, request_ids: Iterable[str]) -> None:
        self.released += request_ids
        if self.fault == "release":
            raise ZeroDivisionError("of its own")


@pytest.mark.costly("several whole runs")
@looped("fault", FAULTS)
def test_a_drafter_that_fails_is_switched_off_with_a_warning_and_the_output_is_that_of_greedy(
    fault: str, oracle: Any, make_ragged: Any, prompts: list[list[int]]
) -> None:
    drafter = Faulty(fault)
    checked = CheckedDrafter(drafter, NAME, oracle.vocab_size)
    engine = build(oracle, make_ragged, checked, batch_size=2)
    with pytest.warns(PluginWarning) as caught:
        done = engine.generate(prompts, 9)
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 9) for ids in prompts]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"drafter {NAME} ")
    assert message.endswith("It is switched off; the output is not affected")
    assert re.search(FAULTS[fault][1], message)
    assert engine.drafting.num_speculative_tokens == 0
    assert sorted(drafter.released) == ["0", "1", "2", "3", "4"], "what it holds of any request is still released"
    calls = drafter.num_proposed, drafter.num_observed
    assert calls[0] <= 3 or fault == "release"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = engine.generate(prompts, 9)
    assert [generation.token_ids for generation in again] == [oracle.reference(ids, 9) for ids in prompts]
    assert engine.report.num_drafted == 0
    assert (drafter.num_proposed, drafter.num_observed) == calls, "it is asked no more"
    assert engine.runner.usage.held == 0


@pytest.mark.parametrize("name", ["drafts_trees", "hidden_layers"])
@pytest.mark.parametrize("answer", [lambda drafter: sys.exit(0), lambda drafter: 1 // 0])
def test_one_that_fails_while_it_says_what_it_wants_is_named(answer: Any, name: str) -> None:
    third = type("Third", (Drafter,), {"propose": None, name: property(answer)})()
    with pytest.raises(PluginError, match=rf"^drafter Third failed in {name}: (SystemExit: 0|ZeroDivisionError: .*)"):
        Engine.from_model(tiny_model(), drafter=third)


@looped("fault", FAULTS)
def test_or_it_ends_the_run_by_option(fault: str, oracle: Any, make_ragged: Any, prompts: list[list[int]]) -> None:
    checked = CheckedDrafter(Faulty(fault), NAME, oracle.vocab_size, on_error="fail")
    engine = build(oracle, make_ragged, checked, batch_size=2)
    with pytest.raises(PluginError, match=FAULTS[fault][1]) as caught:
        engine.generate(prompts, 9)
    assert f"drafter {NAME} " in str(caught.value)
    assert not engine.scheduler.has_work
    assert engine.runner.usage.held == 0


CHANGES: dict[str, Callable[[Row], Any]] = {
    "append": lambda row: row.tokens.append(1),
    "pop and append": lambda row: (row.tokens.pop(), row.tokens.append(1)),
    "item": lambda row: row.tokens.__setitem__(-1, 7),
    "delete": lambda row: row.tokens.__delitem__(0),
    "+=": lambda row: setattr(row, "tokens", row.tokens.__iadd__([1])),
    "tokens": lambda row: setattr(row, "tokens", [1, 2, 3]),
    "request": lambda row: setattr(row.request, "max_new_tokens", 99),
}


class Changing(Drafter):
    """Tries to change tokens, which it may only read, when it is called at `where`."""

    num_speculative_tokens = 2

    def __init__(self, change: Callable[[Row], Any], where: str) -> None:
        self.change, self.where = change, where

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if self.where == "propose":
            self.change(batch.rows[-1])
        return Draft.from_chains([[1] * limit for limit in budget])

    def observe(self, outcome: Outcome) -> None:
        if self.where == "observe":
            self.change(outcome.batch.rows[-1])


@looped("where", ["propose", "observe"])
@looped("change", CHANGES)
def test_tokens_cannot_be_changed_by_a_drafter(
    change: str, where: str, oracle: Any, make_ragged: Any, prompts: list[list[int]]
) -> None:
    drafter = Changing(CHANGES[change], where)
    engine = build(oracle, make_ragged, drafter, batch_size=2, on_drafter_error="disable")
    with pytest.warns(PluginWarning, match=f"failed in {where}: (AttributeError|FrozenInstanceError)"):
        done = engine.generate(prompts, 9)
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 9) for ids in prompts]


class Rewriting(Drafter):
    """Drafts rubbish, and writes what the target would have said into its own tensor once that was packed."""

    num_speculative_tokens = 3

    def __init__(self) -> None:
        self.given = torch.empty(0, dtype=torch.int64)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.given = torch.full((sum(budget),), 3)
        return Draft(self.given, (0, *accumulate(budget)))


def test_a_draft_that_is_rewritten_after_packing_is_verified_as_it_was(
    oracle: Any, make_ragged: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Rewriting()
    engine = build(oracle, make_ragged, drafter, batch_size=2)
    forward = engine.runner.backend.forward

    def rewrite_and_forward(*arguments: Any) -> torch.Tensor:
        drafter.given.copy_(torch.randint(0, 5, drafter.given.shape))
        return forward(*arguments)

    monkeypatch.setattr(engine.runner.backend, "forward", rewrite_and_forward)
    torch.manual_seed(0)
    done = engine.generate(prompts, 12)
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 12) for ids in prompts]


def test_a_plugins_drafter_is_named_with_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMADrafter, "propose", Mock(side_effect=ZeroDivisionError))
    engine = Engine.from_model(tiny_model(), drafter="llma", budget="fixed")
    with pytest.warns(PluginWarning, match=r"drafter 'llma' \(emssd [0-9].*\) failed in propose: ZeroDivisionError"):
        engine.generate([[3, 4]], 5)
    engine = Engine.from_model(tiny_model(), drafter="llma", budget="fixed", on_drafter_error="fail")
    with pytest.raises(PluginError, match=r"drafter 'llma' \(emssd [0-9].*\) failed in propose"):
        engine.generate([[3, 4]], 5)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_drafter_error is 'ignore'; choose disable or fail"):
        CheckedDrafter(Faulty("propose"), None, 11, on_error="ignore")


@looped(("name", "config"), [("cascade", CascadeConfig), ("union", UnionConfig)])
@looped(
    ("names", "options", "said"),
    [
        *((names, {}, "^drafter.drafters is .*give each drafter once, and not {} itself") for names in (
            [], ["llma", "llma"], ["{}"], ["llma", "{}"]
        )),
        (["llma"], {"llmaa": {}}, r"drafter.options.llmaa is set, but drafter.drafters is \['llma'\]"),
        (["llma"], {"llma": {"copy": 3}}, "drafter 'llma' has no option 'copy'. It has match_length, copy_length"),
        (["lama"], {}, r"unknown drafter 'lama'; did you mean 'llma'\? choose one of anpd, "),
    ],
)  # fmt: skip
def test_drafters_of_drafters_that_cannot_be_are_refused(
    name: str, config: Any, names: list[str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=said.format(name)):
        Engine.from_model(tiny_model(), drafter=config([pattern.format(name) for pattern in names], options))
