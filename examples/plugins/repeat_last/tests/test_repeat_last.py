"""Whatever it drafts, the tokens are those of plain greedy decoding."""

import pytest
from emssd_example_repeat import RepeatConfig
from emssd_testing import tiny_model

from emssd import Engine

PROMPTS = [[5, 6, 7], [9], [4, 4, 4, 4]]


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_it_changes_no_token(length, backend):
    model = tiny_model(std=0.12)  # weights as small as these make its text repeat itself
    greedy = Engine.from_model(model, drafter="none", batch_size=2).generate(PROMPTS, 30)
    engine = Engine.from_model(model, drafter=RepeatConfig(length), backend=backend, budget="fixed", batch_size=2)
    assert [row.token_ids for row in engine.generate(PROMPTS, 30)] == [row.token_ids for row in greedy]
    metrics = engine.report.metrics()
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_drafted_tokens"]  # both outcomes were met
