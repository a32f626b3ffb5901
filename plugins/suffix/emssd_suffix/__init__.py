"""Plugin `drafter=suffix`: drafts by how often tokens followed the end of the text before, found by suffix automata."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne, AtLeastZero, Positive, Share
from emssd.hooks import DrafterSpec, offering

__all__ = ["SuffixConfig"]


@dataclass
class SuffixConfig:
    """Options of `drafter=suffix`.

    [A]: Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975, with the defaults of its authors' implementation
    (Arctic Inference). [B]: Hu et al. 2024, "SAM Decoding", arXiv 2411.10666, with the defaults of its authors'
    implementation where it retrieves only.

    Attributes:
        num_speculative_tokens: the most tokens drafted for one row in one step, on one branch (15, ``n_predicts`` of
            [B]).
        max_tree_depth: match and draft together are no longer than this; so a match is of up to ``max_tree_depth -
            num_speculative_tokens`` tokens (64, of [A]).
        max_spec_factor: a match of ``p`` tokens allows a draft of up to ``max_spec_factor * p`` (1.0, α of [A]).
        min_token_prob: a draft ends before the token at which its probability, the product of empirical
            frequencies, falls below this (0.1, of [A]).
        min_match_length: shorter matches draft nothing (1: all count; the threshold of [B], below which another
            drafter, the next of a cascade, is asked).
        cache_tokens: outputs of finished requests are remembered, and drafted from, up to this many tokens in all; of
            these the older half is forgotten at a time (0: no cache, and no row knows of another). A token takes
            about half a kilobyte.
        cache_bias: the cache is preferred where its match is longer than the row's own by more than this (5,
            ``len_bias`` of [B]); where the row's own text has nothing, it is asked in any case.
        branches: from the match that a chain would be made of, draft the tree of the likeliest continuations, by the
            product of frequencies, with up to this many ends (1: a chain).
    """

    num_speculative_tokens: AtLeastOne = 15
    max_tree_depth: AtLeastOne = 64
    max_spec_factor: Positive = 1.0
    min_token_prob: Share = 0.1
    min_match_length: AtLeastOne = 1
    cache_tokens: AtLeastZero = 0
    cache_bias: AtLeastZero = 5
    branches: AtLeastOne = 1


def _build(config: SuffixConfig, context: DrafterContext) -> Drafter:
    from emssd_suffix.drafter import SuffixDrafter

    return SuffixDrafter(config)


emssd_drafters = offering(DrafterSpec("suffix", SuffixConfig, _build))
