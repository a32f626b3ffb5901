"""Plugin `drafter=llma`: copies what followed the same few tokens earlier in the text (LLMA retrieval)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting import Drafter, DrafterContext, Occurrence
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["LLMAConfig", "Occurrence", "Search", "emssd_drafters"]


class Search(str, Enum):
    """The texts in which matches are looked for."""

    prompt = "prompt"
    prompt_and_output = "prompt_and_output"


@dataclass
class LLMAConfig:
    """Options of `drafter=llma`; the defaults are the setting of the EMS-SD paper and of its reference code.

    Attributes:
        match_length: how many of the latest tokens must match (the paper's match length).
        copy_length: how many tokens are copied from behind the match (the paper's copy length).
        search: look in the ``prompt`` only, or in ``prompt_and_output``.
        occurrence: copy from the ``first`` or the ``last`` of several matches.
        require_full_copy: only matches that have `copy_length` tokens behind them count.
        branches: copy from up to this many matches, in the order of `occurrence`, and draft the tree of these copies
            (1: a chain). Tokens that more copies share come first.
    """

    match_length: int = 2
    copy_length: int = 7
    search: Search = Search.prompt
    occurrence: Occurrence = Occurrence.last
    require_full_copy: bool = True
    branches: int = 1


def _build(config: LLMAConfig, context: DrafterContext) -> Drafter:
    from emssd_llma.drafter import LLMADrafter

    return LLMADrafter(config)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("llma", LLMAConfig, _build)]
