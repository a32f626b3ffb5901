"""The plugin of emssd itself: `budget=fixed` and the prompt sources. A plugin like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emssd.data import sources
from emssd.data.records import records_of
from emssd.errors.ranges import AtLeastZero
from emssd.hooks.hookspecs import BudgetSpec, PromptSourceSpec, offering

if TYPE_CHECKING:
    from emssd.drafting import BudgetPolicy

__all__ = ["FixedBudgetConfig"]


@dataclass
class FixedBudgetConfig:
    """`budget=fixed`: every row drafts as much as the drafter wants, or a given number of tokens.

    Attributes:
        num_tokens: per row and step, in a tree its nodes; ``null`` lets the drafter draft as much as it wants.
        depth: the longest way through a row's tree; ``null`` for no limit.
    """

    num_tokens: AtLeastZero | None = None
    depth: AtLeastZero | None = None


def _fixed(config: FixedBudgetConfig) -> BudgetPolicy:
    from emssd.drafting.budget import FixedBudget

    return FixedBudget(config.num_tokens, config.depth)


emssd_budget_policies = offering(BudgetSpec("fixed", FixedBudgetConfig, _fixed))
emssd_prompt_sources = offering(
    PromptSourceSpec("demo", sources.DemoConfig, sources.demo_prompts),
    PromptSourceSpec("text", sources.TextConfig, sources.text_prompts),
    PromptSourceSpec("jsonl", sources.JSONLConfig, lambda config: records_of(config.path, config)),
    PromptSourceSpec("hf", sources.DatasetConfig, sources.dataset_prompts),
    PromptSourceSpec("random", sources.RandomConfig, sources.random_prompts),
)
