"""Plugin `drafter=rest`: copies what most often followed the latest tokens in a datastore made once from a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering

__all__ = ["RestConfig"]


@dataclass
class RestConfig:
    """Options of `drafter=rest`; the defaults are the setting of REST's paper and of its reference code, for chains.

    With trees, that setting is ``branches=64 num_nodes=64``, the preset `drafter=rest_original`.

    Attributes:
        store: folder of the datastore; ``emssd-rest build CORPUS.jsonl FOLDER --tokenizer MODEL`` makes one.
        num_speculative_tokens: the most tokens drafted per row and step, on one branch.
        min_match, max_match: how many of the latest tokens must stand in the store; of these lengths, the longest that
            does is used.
        max_matches: of more places than these, an even sample is looked at.
        branches: draft the tree of the most frequent continuations, with up to this many ends (1: a chain).
        num_nodes: the most tokens of such a tree (null: all that its branches may have together).
    """

    store: str | None = None
    num_speculative_tokens: AtLeastOne = 10
    min_match: AtLeastOne = 2
    max_match: AtLeastOne = 16
    max_matches: AtLeastOne = 5000
    branches: AtLeastOne = 1
    num_nodes: AtLeastOne | None = None


def _build(config: RestConfig, context: DrafterContext) -> Drafter:
    from emssd_rest.drafter import RestDrafter, open_store

    return RestDrafter(config, open_store(config, context))


emssd_drafters = offering(DrafterSpec("rest", RestConfig, _build))
