"""The `Drafter` interface: guesses the next tokens of every row of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting.budget import GoesOn
from emssd.drafting.draft import Draft, Outcome
from emssd.sequences import Batch

__all__ = ["Drafter"]


class Drafter(ABC):
    """Guesses the next tokens of every row of a batch. It can change the speed, never the output.

    Attributes:
        num_speculative_tokens: the most tokens this drafter proposes for one row in one step. A tree has at most 4096.
        drafts_trees: whether a row's tokens may be a tree. Then a row may have more of them than it may still generate.
            It is read once, as the KV cache is made for it.
        num_candidates: how many of the target's best tokens it gets, see `Outcome.candidates`.
        hidden_layers: which hidden states of the target it gets, see `Outcome.hidden`. Index ``k`` is the
            residual stream in front of decoder layer ``k``: 0 is the input of the first layer, ``n`` of ``n`` layers
            the output of the last one, before the final norm. -1 is after that norm: the input of the LM head. (In
            ``hidden_states`` of Transformers, that takes the place of ``n``.) It is read once. Rows whose prompts begin
            alike share no KV then, since nothing is computed for shared tokens.
        replays: what is replayed, in words, by a drafter that knows the output beforehand. Its figures are called a
            replay wherever they are shown. ``None``: it drafts in earnest.
        label: its name in a line below the figures of a run; the registry sets that of its plugin.
    """

    num_speculative_tokens: int = 0
    drafts_trees: bool = False
    num_candidates: int = 0
    hidden_layers: tuple[int, ...] = ()
    replays: str | None = None
    label: str = ""

    @abstractmethod
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        """Draft for every row of `batch`. Called in steps in which some row has a budget.

        Args:
            batch: the rows of this step, which can be read only.
            budget: ``[B]`` the most tokens to draft for each row; 0 means none. Fewer, or none, is always fine.

        Returns:
            A `Draft` with one row per row of the batch and ids below the vocabulary size. In a tree, no node is deeper
            than ``row.num_remaining - 1``, as every step gives one token of the target's own; see `Draft.shallow`.
        """

    def end_by(self, goes_on: GoesOn | None) -> None:
        """Ask `goes_on` between passes which rows to draft further; ``None``: draft all of them to their budgets.

        Called when an engine takes the drafter, or another budget policy. Only drafters that run a model level by level
        need it.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn what was accepted: roll back an own cache, adapt.

        Called once after every step, asked or not. A step that fails has none: its rows are proposed for again, as they
        were. A drafter with `hidden_layers` is also called after steps of nothing but pieces of prompts, with an empty
        batch.
        """

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of these requests: they ended, or were preempted. Unknown ids are no error.

        A request that comes again was preempted: it begins anew, with the tokens that it had.
        """

    def reset(self) -> None:
        """Become as new: drop what was learnt across requests, while none runs.

        Called after a warm-up, which decodes the first prompts of the timed run. Only a drafter that keeps
        something of released requests needs it.
        """
