"""REST: drafts are what most often follows the longest part of the context's end that stands in a datastore."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter, DrafterContext, Tree, joined_trees
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_rest import RestConfig
from emssd_rest.search import StoreSearch
from emssd_rest.store import HEADER, SUFFIXES, TOKENS, Store, fingerprint

__all__ = ["RestDrafter", "open_store"]


class RestDrafter(Drafter):
    """Drafts for every row from one store, anew in each step, so that there is nothing to roll back or to forget."""

    def __init__(self, config: RestConfig, store: Store) -> None:
        if config.min_match > config.max_match:
            raise ConfigError(
                f"drafter.min_match is {config.min_match} and drafter.max_match {config.max_match}; "
                f"no match is that long and that short"
            )
        self._most_nodes = config.branches * config.num_speculative_tokens
        if config.num_nodes is not None:
            if config.branches == 1:
                raise ConfigError(
                    f"drafter.num_nodes is {config.num_nodes} and drafter.branches 1; a tree has at least 2 branches"
                )
            self._most_nodes = min(self._most_nodes, config.num_nodes)
        self._config = config
        self._search = StoreSearch(store)
        self._path, self._num_ids = store.path, store.header.num_ids
        self.num_speculative_tokens = self._most_nodes
        self.drafts_trees = config.branches > 1

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = [self._draft(row, min(limit, self._most_nodes)) for row, limit in zip(batch, budget, strict=True)]
        return joined_trees(rows, chains=not self.drafts_trees)

    def _draft(self, row: Row, limit: int) -> Tree:
        config, nothing = self._config, Tree([], [], [])
        depth = min(config.num_speculative_tokens, row.num_remaining - 1) if self.drafts_trees else limit
        if min(limit, depth) < 1:
            return nothing
        try:
            match, places = self._search.longest(row.tokens, config.min_match, config.max_match)
            if not match:
                return nothing
            behind = self._search.behind(match, places, config.max_matches)
            drafted = self._search.tree(behind, depth, limit, config.branches)
        except IndexError as error:
            raise self._damaged(f"{SUFFIXES} points outside of {TOKENS}") from error
        if (largest := max(drafted.token_ids, default=0)) >= self._num_ids:
            raise self._damaged(f"{TOKENS} holds the id {largest}, and {HEADER} tells of ids up to {self._num_ids - 1}")
        return drafted

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"store {self._path} is damaged: {what}; build it anew")


def open_store(config: RestConfig, context: DrafterContext) -> Store:
    """The store of `config`. Raises ConfigError: there is none, or it is of another tokenizer."""
    if config.store is None:
        raise ConfigError(
            "drafter=rest drafts from a datastore: give drafter.store=FOLDER, and make one with "
            "emssd-rest build CORPUS.jsonl FOLDER --tokenizer MODEL"
        )
    store = Store.open(config.store)
    header, anew = store.header, "build one with --tokenizer set to the target's folder or hub id"
    if header.tokenizer and context.tokenizer is not None and header.tokenizer != fingerprint(context.tokenizer):
        raise ConfigError(
            f"store {store.path} cannot draft for this target: its tokenizer ({header.vocab_size} tokens) is not the "
            f"target's ({len(context.tokenizer)} tokens); {anew}"
        )
    if header.num_ids > context.vocab_size:
        raise ConfigError(
            f"store {store.path} cannot draft for this target: it holds token ids up to {header.num_ids - 1}, and the "
            f"target's vocabulary has {context.vocab_size} tokens; {anew}"
        )
    return store
