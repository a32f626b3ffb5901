"""Goodput: choose the drafts of all rows together so that the expected accepted tokens per second are the most.

After Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec),
with a length of its own for every row, which ragged verification makes free (EMS-SD paper, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from emssd.budget import BudgetPolicy
from emssd.draft import Draft, Outcome
from emssd.errors import ConfigError
from emssd.sequence import Batch
from emssd.stats import StepStats
from emssd_adaptive.stage import StageRecord
from emssd_adaptive.step_time import StepTime

__all__ = ["AdaptiveBudget"]

_NEGLIGIBLE = 0.01  # of a step's time
_TRIAL_STEPS, _TRIALS = 9, (0, 2, 1000)  # without a warm-up, the first steps draft nothing, little and all in turn


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their verification.

    A token of a row's draft is worth the probability that it is accepted with all before it. Sorted by that, tokens are
    taken as long as the step's expected rate, ``(B + Σ worth) ÷ (t(tokens, context) + t_draft)``, grows.

    Args:
        memory, probe_interval: see `AdaptiveConfig`.
    """

    def __init__(self, memory: float = 16.0, probe_interval: int = 32) -> None:
        if memory < 1 or probe_interval < 1:
            raise ConfigError(
                f"budget.memory is {memory} and budget.probe_interval is {probe_interval}; both must be at least 1"
            )
        self._memory, self._probe_interval = memory, probe_interval
        self._time = StepTime()
        self._stages: list[StageRecord] = []
        self._lengths: dict[str, int] = {}  # tokens of each row before this step
        # Of the earlier stages of this step: drafted tokens, and how many of them are expected to be accepted.
        self._num_drafted, self._gained = 0, 0.0

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        if stage == 0:
            self._lengths = {row.request_id: len(row.tokens) for row in batch}
            self._gained, self._num_drafted = 0.0, 0
        while len(self._stages) <= stage:
            self._stages.append(StageRecord(self._memory, self._probe_interval))
        record = self._stages[stage]
        return record.probed(self._choose(batch, limits, num_other_tokens, record, drafting=True), limits)

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> Seq[int]:
        record, lengths = self._stages[stage], draft.lengths
        if not any(lengths):
            return lengths
        chosen = (
            lengths if record.is_probing else self._choose(batch, lengths, num_other_tokens, record, drafting=False)
        )
        worth = record.acceptance.gains(batch.request_ids, max(lengths))
        self._gained += float(worth[np.arange(max(lengths)) < np.asarray(chosen)[:, None]].sum())
        self._num_drafted += sum(chosen)
        return chosen

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        for record, stage in zip(self._stages, stats.stages, strict=False):
            record.observe(outcome, stage, self._lengths)
        seconds = sum(stats.seconds.values()) - stats.seconds["draft"]
        self._time.observe(stats.num_tokens, stats.num_kv_tokens, seconds)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for record in self._stages:
            record.release(request_ids)

    def _choose(
        self, batch: Batch, limits: Seq[int], num_other_tokens: int, record: StageRecord, *, drafting: bool
    ) -> list[int]:
        """``[B]`` lengths up to `limits` with the best expected rate; with `drafting`, its time counts too."""
        depth = max(limits, default=0)
        if not depth or not self._time.is_known:
            return list(limits)
        if drafting and self._time.num_observed < _TRIAL_STEPS:  # a curve is not known by one of its points
            return [min(limit, _TRIALS[self._time.num_observed % len(_TRIALS)]) for limit in limits]
        num_kv_tokens = sum(len(row.tokens) for row in batch)
        num_decoding = len(batch) + self._num_drafted
        num_fixed = sum(row.num_uncached for row in batch) + num_other_tokens
        # Prompts are computed sooner or later: what they take in this step is no reason to draft more.
        decoding_only_and_all = np.asarray([float(num_decoding), float(num_fixed)])
        without, fixed = np.maximum(self._time.verify_seconds(decoding_only_and_all, num_kv_tokens), 1e-9)
        base = len(batch) + self._gained
        worth = record.acceptance.gains(batch.request_ids, depth)
        if drafting:
            worth[:, 0] -= base / without * record.catch_up_seconds(self._lengths)
            worth = np.maximum(np.minimum.accumulate(worth, axis=1), 0.0)
        worth[np.arange(depth) >= np.asarray(limits)[:, None]] = 0.0
        best_rate, cap, taken = 0.0, 0, 0
        levels = float(record.draft_seconds(depth, np.zeros(1))[0]) if drafting else 0.0
        for deepest in range(1, depth + 1) if levels > _NEGLIGIBLE * without else (depth,):
            ranked = np.sort(worth[:, :deepest], axis=None)[::-1]
            ranked = ranked[ranked > 0]
            gain = base + np.concatenate([[0.0], np.cumsum(ranked)])
            count = np.arange(len(ranked) + 1, dtype=np.float64)
            seconds = self._time.verify_seconds(num_fixed + count, num_kv_tokens) - fixed + without
            if drafting:
                seconds[1:] += record.draft_seconds(deepest, count[1:])
            rates = gain / np.maximum(seconds, 1e-9)
            most = int(np.argmax(rates))
            if rates[most] > best_rate:
                best_rate, cap, taken = float(rates[most]), deepest, most
        # Worths never rise within a row, and equal ones are taken in order: what is chosen is a beginning of each row.
        places = np.argsort(-worth[:, :cap], axis=None, kind="stable")[:taken]
        chosen: list[int] = np.bincount(places // max(cap, 1), minlength=len(batch)).tolist()
        return chosen
