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

import pytest
import torch
from emssd_cascade import CascadeConfig
from emssd_llma import LLMADrafter
from emssd_union import UnionConfig

from emssd import Engine
from emssd.drafting import Draft, Drafter, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import ConfigError, PluginError, PluginWarning
from emssd.sequences import Batch, Row
from emssd.testing.models import tiny_model
from tests.support.tiers import looped

NAME = "'bad' (emssd-bad 1.2)"


class MuteError(Exception):
    def __str__(self) -> str:
        sys.exit(0)

    __repr__ = __str__


class Faulty(Drafter):
    """Drafts two tokens, until at step `due` it commits a fault."""

    num_speculative_tokens = 4

    def __init__(self, fault: str, due: int = 3) -> None:
        self.fault, self.due = fault, due
        self.num_proposed = self.num_observed = 0
        self.released: list[str] = []

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.num_proposed, self.budget = self.num_proposed + 1, budget
        if self.num_proposed != self.due:
            return Draft.from_chains([[1, 2][:limit] for limit in budget])
        match self.fault:
            case "propose":
                raise ZeroDivisionError("of its own")
            case "exit in propose":
                sys.exit(0)
            case "mute":
                raise MuteError
            case "talks":
                raise ValueError(200_000 * "x")
            case "default device":
                torch.set_default_device("meta")
            case "device":
                torch.device("meta").__enter__()
            case "default dtype":
                torch.set_default_dtype(torch.float16)
            case "autocast":
                torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
            case "warnings":
                warnings.simplefilter("error")
            case "count":
                self.num_speculative_tokens = 2.5  # type: ignore[assignment]  # that is the fault
            case "candidates":
                self.num_candidates = -1
            case "late tree":
                self.drafts_trees = True
                return Draft.from_trees([(1, -1), (2, -1)][:limit] for limit in budget)
            case "no draft":
                return None  # type: ignore[return-value]  # that is the fault
            case "no tensor":
                return Draft([1], (0, *[1] * len(batch)))  # type: ignore[arg-type]  # that is the fault
            case "meta":
                return Draft(torch.ones(len(batch), dtype=torch.int64, device="meta"), tuple(range(len(batch) + 1)))
            case "dtype":
                return Draft(torch.ones(0, dtype=torch.int32), (0,) * (len(batch) + 1))
            case "budget":
                return Draft.from_chains([[1] * (limit + 1) for limit in budget])
            case "vocabulary":
                return Draft.from_chains([[11][:limit] for limit in budget])
            case "rows":
                return Draft.empty(len(batch) + 1)
            case "indptr":
                return Draft(torch.tensor([1]), (0, 2, *[1] * (len(batch) - 1)))
            case "tree":
                chains = Draft.from_chains([1, 2][:limit] for limit in budget)
                return Draft(chains.token_ids, chains.indptr, parents=(0,) * chains.indptr[-1])
        return Draft.empty(len(batch))

    def observe(self, outcome: Outcome) -> None:
        self.num_observed += 1
        if self.fault == "observe" and self.num_observed == self.due:
            raise ZeroDivisionError("of its own")
        if self.fault == "exit in observe" and self.num_observed == self.due:
            sys.exit(0)

    def release(self, request_ids: Iterable[str]) -> None:
        self.released += request_ids
        if self.fault == "release":
            raise ZeroDivisionError("of its own")


FAULTS = {
    "propose": r"failed in propose: ZeroDivisionError: of its own",
    "observe": r"failed in observe: ZeroDivisionError: of its own",
    "release": r"failed in release: ZeroDivisionError: of its own",
    "no draft": "it returned a NoneType; return an emssd.drafting.Draft",
    "no tensor": "its token_ids are a list; give one int64 tensor",
    "exit in propose": r"failed in propose: SystemExit: 0",
    "exit in observe": r"failed in observe: SystemExit: 0",
    "mute": "failed in propose: MuteError: no message, as that raises SystemExit",
    "talks": r"failed in propose: ValueError: x{600} …\Z|x{600} …\. It is",
    "default device": "its token_ids are on the device meta",
    "device": "its token_ids are on the device meta",
    "default dtype": "failed in propose: it left the default dtype changed",
    "autocast": "failed in propose: it left autocast changed",
    "warnings": "failed in propose: it left warnings.filters changed",
    "count": "its num_speculative_tokens is 2.5; it must be an integer, at least 0",
    "candidates": "its num_candidates is -1; it must be an integer, at least 0",
    "late tree": "it drafted a token tree for request .*, and its drafts_trees is False",
    "dtype": "its token_ids are torch.int32",
    "meta": "its token_ids are on the device meta",
    "budget": r"it drafted \d tokens for request '\d' with a budget of \d",
    "vocabulary": "it drafted token id 11, outside the target's vocabulary of 11",
    "rows": "its draft has 3 rows .* but the batch has 2 rows",
    "indptr": "broke its interface",
    "tree": "node 0 of its tree for request .* has parent 0; a parent is an earlier node",
}


@pytest.mark.costly("several whole runs")
@looped("fault", FAULTS)
def test_a_drafter_that_fails_is_switched_off_with_a_warning_and_the_output_is_that_of_greedy(
    fault: str, oracle: Any, make_ragged: Any, build: Any, prompts: list[list[int]]
) -> None:
    drafter = Faulty(fault)
    engine = build(oracle, make_ragged, drafter, batch_size=2, drafter_name=NAME, on_drafter_error="disable")
    with pytest.warns(PluginWarning) as caught:
        done = engine.generate(prompts, 9)
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 9) for ids in prompts]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"drafter {NAME} ")
    assert message.endswith("It is switched off; the output is not affected")
    assert re.search(FAULTS[fault], message)
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
def test_or_it_ends_the_run_by_option(
    fault: str, oracle: Any, make_ragged: Any, build: Any, prompts: list[list[int]]
) -> None:
    engine = build(oracle, make_ragged, Faulty(fault), batch_size=2, drafter_name=NAME, on_drafter_error="fail")
    with pytest.raises(PluginError, match=FAULTS[fault]) as caught:
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
    "num_cached": lambda row: setattr(row, "num_cached", 0),
    "max_length": lambda row: setattr(row, "max_length", 99),
    "finish_reason": lambda row: setattr(row, "finish_reason", None),
    "request": lambda row: setattr(row.request, "max_new_tokens", 99),
    "extend": lambda row: row.extend([1]),
    "advance": lambda row: row.advance([1], None, num_drafted=0, num_accepted=0),
}


class Changing(Drafter):
    """Tries to change a row, which it may only read, when it is called at `where`."""

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
def test_rows_cannot_be_changed_by_a_drafter(
    change: str, where: str, oracle: Any, make_ragged: Any, build: Any, prompts: list[list[int]]
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
    oracle: Any, make_ragged: Any, build: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
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
    def failing(self: Any, batch: Batch, budget: Seq[int]) -> Draft:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(LLMADrafter, "propose", failing)
    engine = Engine.from_model(tiny_model(), drafter="llma")
    with pytest.warns(PluginWarning, match=r"drafter 'llma' \(emssd [0-9].*\) failed in propose: ZeroDivisionError"):
        engine.generate([[3, 4]], 5)
    engine = Engine.from_model(tiny_model(), drafter="llma", on_drafter_error="fail")
    with pytest.raises(PluginError, match=r"drafter 'llma' \(emssd [0-9].*\) failed in propose"):
        engine.generate([[3, 4]], 5)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_drafter_error is 'ignore'; choose disable or fail"):
        CheckedDrafter(Faulty("none"), None, 11, on_error="ignore")


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
        Engine.from_model(tiny_model(), drafter=config([each.format(name) for each in names], options))
