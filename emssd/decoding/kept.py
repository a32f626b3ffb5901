"""Hidden states of the tokens that a step kept: prompts, their pieces, newest tokens and accepted nodes."""

from __future__ import annotations

from dataclasses import replace

from emssd.attention import PackedInputs
from emssd.drafting import HiddenStates, Outcome
from emssd.model import ModelOutput

__all__ = ["with_hidden"]


def with_hidden(outcome: Outcome, packed: PackedInputs, output: ModelOutput) -> Outcome:
    """`outcome` with the hidden states of kept tokens, if `output` has any.

    Args:
        outcome: of the step; its rows have been advanced.
        packed: the step: the rows of the batch, each with its draft behind its tokens, then pieces of prompts.
        output: what the target computed.
    """
    if not output.hidden:
        return outcome
    starts, places, indptr, drafted = list[int](), list[int](), [0], outcome.draft.lengths
    rows = zip(packed.qo_indptr, packed.lengths, packed.kv_lens, strict=False)
    for row, (begin, length, kv_len) in enumerate(rows):
        starts.append(kv_len - length)
        if row < len(outcome.batch):
            origin = begin + length - drafted[row]
            kept = [*range(begin, origin), *(origin + node for node in outcome.accepted[row])]
            # What an EOS or a limit cut off the sequence belongs to no token of it.
            places += kept[: len(outcome.batch.sequences[row].tokens) - starts[-1]]
        else:
            places += range(begin, begin + length)
        indptr.append(len(places))
    hidden = HiddenStates(
        packed.request_ids,
        tuple(starts),
        tuple(indptr),
        tuple(output.hidden),
        tuple(output.hidden.values()),
        tuple(places),
    )
    return replace(outcome, hidden=hidden)
