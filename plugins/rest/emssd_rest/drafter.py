"""REST: drafts are what most often follows the longest part of the context's end that stands in a datastore."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.sequences import Batch
from emssd_rest import RestConfig
from emssd_rest.search import StoreSearch
from emssd_rest.store import HEADER, SUFFIXES, TOKENS, Store, fingerprint

__all__ = ["RestDrafter"]


class RestDrafter(Drafter):
    """Drafts for every row from one store, anew in each step, so that there is nothing to roll back or to forget.

    Args:
        config: see `RestConfig`; its `store` is not read.
        store: an open store whose ids are the target's.

    Raises:
        ConfigError: a length below one, or `min_match` above `max_match`.
    """

    def __init__(self, config: RestConfig, store: Store) -> None:
        for name in ("num_speculative_tokens", "min_match", "max_match", "max_matches"):
            if getattr(config, name) < 1:
                raise ConfigError(f"drafter.{name} is {getattr(config, name)}; it must be at least 1")
        if config.min_match > config.max_match:
            raise ConfigError(
                f"drafter.min_match is {config.min_match} and drafter.max_match {config.max_match}; "
                f"no match is that long and that short"
            )
        self._config = config
        self._search = StoreSearch(store)
        self._path, self._num_ids = store.path, store.header.num_ids
        self.num_speculative_tokens = config.num_speculative_tokens

    @classmethod
    def load(cls, config: RestConfig, context: DrafterContext) -> RestDrafter:
        """Open the store of `config`.

        Raises:
            ConfigError: there is none, or it is of another tokenizer.
        """
        if config.store is None:
            raise ConfigError(
                "drafter=rest drafts from a datastore: give drafter.store=FOLDER, and make one with "
                "emssd-rest build CORPUS.jsonl FOLDER --tokenizer MODEL"
            )
        store = Store.open(config.store)
        _check_vocabulary(store, context)
        return cls(config, store)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        most = self.num_speculative_tokens
        pairs = zip(batch, budget, strict=True)
        return Draft.from_chains(self._draft(row.tokens, min(limit, most)) for row, limit in pairs)

    def _draft(self, tokens: Seq[int], limit: int) -> list[int]:
        config = self._config
        if limit < 1:
            return []
        try:
            match, places = self._search.longest(tokens, config.min_match, config.max_match)
            ids = self._search.chain(match, places, limit, config.max_matches) if match else []
        except IndexError as error:
            raise self._damaged(f"{SUFFIXES} points outside of {TOKENS}") from error
        if ids and max(ids) >= self._num_ids:
            raise self._damaged(
                f"{TOKENS} holds the id {max(ids)}, and {HEADER} tells of ids up to {self._num_ids - 1}"
            )
        return ids

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"store {self._path} is damaged: {what}; build it anew")


def _check_vocabulary(store: Store, context: DrafterContext) -> None:
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
