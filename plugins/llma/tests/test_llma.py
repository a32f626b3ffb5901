"""The meaning of LLMA's options. `tests.drafting.test_lookup` holds its drafts against a search of the whole text."""

from __future__ import annotations

from typing import Any

from emssd_llma import LLMAConfig, LLMADrafter, Occurrence
from emssd_testing.models import tiny_model

from emssd import Engine
from emssd.sequences import Batch, Request, Row
from tests.support.tiers import looped
from tests.support.trees import row_of


def chain(drafter: LLMADrafter, row: Row, budget: int) -> list[int]:
    return drafter.propose(Batch((row,)), [budget]).token_ids.tolist()


def test_the_defaults_are_the_papers_setting_prompt_only_last_match_and_a_full_copy() -> None:
    prompt = [3, 4, 10, 11, 12, 13, 14, 15, 16, 17, 3, 4, 20, 21, 22, 23, 24, 25, 26, 27, 3, 4, 30, 3, 4]
    drafter = LLMADrafter(LLMAConfig())
    # The last (3, 4) with seven tokens after it; the one before 30 has only three.
    assert chain(drafter, row_of(prompt), 7) == [20, 21, 22, 23, 24, 25, 26]
    # Nothing is found in the output, however often it repeats itself.
    assert chain(drafter, row_of(prompt, [8, 9] * 10, name="b"), 7) == []


@looped(
    ("options", "expected"),
    [
        ({"occurrence": Occurrence.first}, [10, 11, 3]),
        ({"occurrence": Occurrence.last}, [20, 21, 3]),
        ({"occurrence": Occurrence.last, "require_full_copy": False}, [30, 3, 4]),
        ({"occurrence": Occurrence.last, "copy_length": 1}, [30]),
        ({"match_length": 1, "require_full_copy": False}, [30, 3, 4]),
        ({"match_length": 3}, []),
    ],
)
def test_what_each_option_does(options: dict[str, Any], expected: list[int]) -> None:
    text = [3, 4, 10, 11, 3, 4, 20, 21, 3, 4, 30, 3, 4]
    config = LLMAConfig(**({"copy_length": 4} | options))
    assert chain(LLMADrafter(config), row_of(text), 3) == expected


def test_a_released_request_is_forgotten_and_its_name_can_be_used_again() -> None:
    drafter = LLMADrafter(LLMAConfig(copy_length=2))
    assert chain(drafter, row_of([3, 4, 5, 6, 3, 4]), 7) == [5, 6]
    drafter.release(["a", "never seen"])
    assert chain(drafter, row_of([9, 9, 8, 8, 3, 4]), 7) == []
    assert chain(drafter, row_of([9, 9, 8, 8, 3, 4], [9, 9]), 7) == [8, 8]


def test_after_a_run_no_index_is_left() -> None:
    drafter = LLMADrafter(LLMAConfig())
    engine = Engine.from_model(tiny_model(), drafter=drafter, batch_size=2)
    engine.generate([[3, 4] * 6, [5, 6, 7], [8, 9] * 5], 12)
    assert drafter._indexes == {}


def test_choices_may_be_given_as_text() -> None:
    row = Row(Request("a", (1, 2, 3), 9))
    row.extend([8, 9, 7, 8, 9])
    drafter = LLMADrafter(LLMAConfig(copy_length=1, search="prompt_and_output", occurrence="first"))  # type: ignore[arg-type]
    assert drafter.propose(Batch((row,)), [1]).token_ids.tolist() == [7]
