"""The law of sampled tokens on the path that users run, with drafts, by G-tests conditional on what stands before.

The seeds are fixed. With other seeds, one of all these tests would fail once in a hundred times (Bonferroni).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import pytest
import torch

from emssd.sampling import SamplingParams
from emssd.sequences import Request
from emssd.testing.drafters import TreeDrafter
from tests.sampling.test_engine import VOCAB, decode, logits_behind, make_engine
from tests.support import sampling as reference
from tests.support.tiers import only
from tests.support.trees import TREE_BACKENDS

PROMPT, NUM_ROWS, NUM_PREFIXES = (3, 1, 4, 1), 2000, 3
MODES = {
    "temperature": SamplingParams(temperature=1.3, seed=11),
    "top-k": SamplingParams(temperature=1.3, top_k=5, seed=12),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7, seed=13),
    "penalties": SamplingParams(temperature=1.1, repetition_penalty=1.6, presence_penalty=0.8, seed=14),
}
LIMIT = 1 - 0.01 / (len(MODES) * (2 + NUM_PREFIXES))


def p_value_below(tokens: Seq[int], chances: Seq[float]) -> float:
    """Probability of a G statistic below that of `tokens`, if each comes with its chance. Rare ones are one class."""
    counts = Counter(tokens)
    assert not [token for token in counts if not chances[token]], "a token that cannot be"
    classes = [(float(counts[token]), len(tokens) * chance) for token, chance in enumerate(chances) if chance]
    common = [each for each in classes if each[1] >= 5]
    if rare := [each for each in classes if each[1] < 5]:
        common.append((sum(found for found, _ in rare), sum(expected for _, expected in rare)))
    assert len(common) >= 3
    found, expected = torch.tensor(common, dtype=torch.float64).T
    statistic = 2 * torch.special.xlogy(found, found / expected).sum()
    return float(torch.distributions.Chi2(torch.tensor(len(common) - 1.0, dtype=torch.float64)).cdf(statistic))


@pytest.mark.parametrize("mode", only(MODES, ci=["top-k", "penalties"]))
def test_tokens_follow_the_targets_law_behind_every_common_prefix(mode: str) -> None:
    """Rows differ by their ids alone. Some tokens are drafted and accepted, others are the target's own."""
    params = MODES[mode]
    asked = [Request(f"row {number}", PROMPT, 3, sampling=params) for number in range(NUM_ROWS)]
    engine = make_engine(TreeDrafter(VOCAB, 8), TREE_BACKENDS["ragged-page-1"], batch_size=64, max_step_tokens=512)
    texts = list(decode(engine, asked).values())
    assert NUM_ROWS / 5 < engine.report.num_accepted < NUM_ROWS
    firsts = Counter(text[0] for text in texts)
    pairs = Counter(text[:2] for text in texts)
    beginnings = [(), *((token,) for token, _ in firsts.most_common(NUM_PREFIXES)), pairs.most_common(1)[0][0]]
    for beginning in beginnings:
        prefix, place = (*PROMPT, *beginning), len(beginning)
        scores = reference.scores(logits_behind(prefix), params, prefix, len(PROMPT))
        tokens = [text[place] for text in texts if text[:place] == beginning]
        assert p_value_below(tokens, reference.probabilities(scores)) < LIMIT, beginning
