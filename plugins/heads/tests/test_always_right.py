"""A drafter that its target always agrees with is always accepted, whatever happens to its rows.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

import pytest

from tests.support.right_drafters import RIGHT, trial
from tests.support.right_drafts import KINDS, NUM_NEW
from tests.support.tiers import looped

ALL = [(name, shape) for name, right in RIGHT.items() for shape in right.shapes]
EACH = pytest.mark.parametrize("name", RIGHT)


@EACH
def test_the_text_is_worth_guessing(name: str) -> None:
    """It repeats itself late, no rounding decides it, and all of its last three tokens count."""
    case = trial(name)
    texts = [case.text(str(row), prompt, None) for row, prompt in enumerate(case.prompts)]
    assert len({text[start : start + 3] for text in texts for start in range(NUM_NEW - 2)}) > 30


@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
@pytest.mark.parametrize(("name", "shape"), ALL)
@pytest.mark.costly("every kind of sampling and backend")
def test_its_drafts_are_always_accepted(name: str, shape: str, kinds: str, backend: str) -> None:
    case, (options, depth) = trial(name), RIGHT[name].shapes[shape]
    case.make_engine(options, backend)
    case.decode(KINDS[kinds])
    assert case.is_full(depth)


@looped("max_step_tokens", [5, 24])
@pytest.mark.parametrize(("name", "shape"), ALL)
def test_prompts_in_pieces(name: str, shape: str, max_step_tokens: int) -> None:
    case = trial(name)
    case.make_engine(RIGHT[name].shapes[shape][0], max_step_tokens=max_step_tokens, batch_size=2)
    for generation in case.decode():
        assert generation.num_accepted > NUM_NEW // 2
        assert shape != "chain" or generation.num_accepted == generation.num_drafted


@EACH
def test_rows_that_are_preempted_begin_anew(name: str) -> None:
    trial(name).decode_preempted(RIGHT[name].shapes["chain"][0], RIGHT[name].roomy)


@EACH
def test_a_step_that_failed_is_drafted_for_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (options, depth) = trial(name), [*RIGHT[name].shapes.values()][-1]
    case.make_engine(options)
    case.failing_steps(monkeypatch)
    assert case.is_full(depth)
