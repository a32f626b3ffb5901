"""A drafter that reads hidden states, for docs/tutorial/hidden_states.md."""

from collections.abc import Iterable, Sequence

import torch

from emssd import sequences
from emssd.drafting import Draft, Drafter, Outcome
from emssd.sequences import Batch


class SimilarPlaces(Drafter):
    """Finds the earlier place whose hidden state is most like the latest one, and drafts the tokens after it."""

    num_speculative_tokens = 3
    hidden_layers = (-1,)  # what the LM head is given

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}  # [n, width] of all tokens of a row but the newest

    def propose(self, batch: Batch, budget: Sequence[int]) -> Draft:
        return Draft.from_chains(self.behind(row)[:limit] for row, limit in zip(batch, budget, strict=True))

    def behind(self, row: sequences.Row) -> list[int]:
        states = self.states.get(row.request_id)
        if states is None or len(states) < 2:
            return []
        place = int((states[:-1] @ states[-1]).argmax())
        return row.tokens[place + 2 :]  # the token at place + 1 corresponds to the newest one

    def observe(self, outcome: Outcome) -> None:
        if outcome.hidden is not None:
            for name, start, (states,) in outcome.hidden.rows():
                known = self.states[name][:start] if start else states[:0]
                self.states[name] = torch.cat([known, states])

    def release(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.states.pop(name, None)
