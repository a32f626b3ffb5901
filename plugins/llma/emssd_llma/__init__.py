"""Plugin `drafter=llma`: copies what followed the same few tokens earlier in the text (LLMA retrieval)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting import LookupDrafter, Occurrence
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering

__all__ = ["LLMAConfig", "LLMADrafter", "Occurrence", "Search"]


class Search(str, Enum):
    """The texts in which matches are looked for."""

    prompt = "prompt"
    prompt_and_output = "prompt_and_output"


@dataclass
class LLMAConfig:
    """Options of `drafter=llma`; the defaults are the setting of the EMS-SD paper and of its reference code.

    Attributes:
        match_length: how many of the latest tokens must match (the paper's match length).
        copy_length: how many tokens are copied from after the match (the paper's copy length).
        search: look in the ``prompt`` only, or in ``prompt_and_output``.
        occurrence: copy from the ``first`` or the ``last`` of several matches.
        require_full_copy: only matches that have `copy_length` tokens after them count.
        branches: copy from up to this many matches, in the order of `occurrence`, and draft the tree of these copies
            (1: a chain). Tokens that more copies share come first.
    """

    match_length: AtLeastOne = 2
    copy_length: AtLeastOne = 7
    search: Search = Search.prompt
    occurrence: Occurrence = Occurrence.last
    require_full_copy: bool = True
    branches: AtLeastOne = 1


class LLMADrafter(LookupDrafter):
    """Drafts, per row, what followed the row's latest `match_length` tokens at an earlier place, or several.

    Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large Language Models"; batched as in the
    EMS-SD paper, §4.1.
    """

    def __init__(self, config: LLMAConfig) -> None:
        num_behind = {config.match_length: config.copy_length if config.require_full_copy else 1}
        prompt_only = config.search == Search.prompt
        super().__init__(num_behind, config.copy_length, config.occurrence, prompt_only, config.branches)


emssd_drafters = offering(DrafterSpec("llma", LLMAConfig, lambda config, _: LLMADrafter(config)))
