"""The drafter keeps every rule of its interface, drafts what it should, and some of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from emssd import Engine
from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import check_options
from emssd.sequences import Batch, Request, Row
from emssd_testing import DrafterConformance, tiny_model

from emssd_bigram import BigramConfig
from emssd_bigram.drafter import BigramDrafter


class TestBigram(DrafterConformance):
    config = BigramConfig

    def make_drafter(self, context: DrafterContext) -> Drafter | Sequence[Drafter]:
        return BigramDrafter(BigramConfig())


@pytest.mark.parametrize(
    ("tokens", "budget", "min_count", "expected"),
    [
        ([5, 6, 7, 5], 4, 1, [6, 7, 5, 6]),
        ([5, 6, 7, 5], 2, 1, [6, 7]),
        ([5, 8, 5, 6, 5, 6, 5], 1, 1, [6]),  # seen twice, and 8 once
        ([5, 8, 6, 5, 8, 9, 5], 4, 2, [8]),  # of what followed 8, nothing was seen twice
        ([5, 6, 7], 4, 1, []),
        ([5], 4, 1, []),
    ],
)
def test_it_drafts_along_the_most_frequent_pairs(
    tokens: list[int], budget: int, min_count: int, expected: list[int]
) -> None:
    drafter = BigramDrafter(BigramConfig(min_count=min_count))
    draft = drafter.propose(Batch((Row(Request("a", tuple(tokens), 20)),)), [budget])
    assert draft.token_ids.tolist() == expected


def test_some_of_its_drafts_are_accepted() -> None:
    drafter = BigramDrafter(BigramConfig())
    engine = Engine.from_model(tiny_model(std=0.12), drafter=drafter, budget="fixed", batch_size=2)
    engine.generate([[5, 6, 7], [9]], 30, ignore_eos=True)
    assert engine.report.num_accepted > 0


@pytest.mark.parametrize("name", ["length", "min_count"])
def test_an_option_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafter\.{name} is 0"):
        check_options(BigramConfig(**{name: 0}), "drafter")
