"""Drafts with a model of another tokenizer: texts are encoded anew, or tokens that both vocabularies have are drafted.

Timor et al. 2025, arXiv 2502.05202: by the text is their string-level exact match, known as universal assisted
generation; by shared tokens is their token-level intersection. What is drafted is verified like any other draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.attention import on_device
from emssd.draft_models import Node
from emssd.drafting import Draft, Outcome
from emssd.model import ModelRunner
from emssd.sequences import Batch, Request, Row, TokenBytes
from emssd_draft_model.drafter import DraftModelDrafter

__all__ = ["Speech", "TranslatedDrafter", "shared_ids"]

_AGAIN = 8  # tokens before new ones that are encoded once more with them, as words are only then whole


class Speech:
    """A tokenizer by the bytes of its tokens.

    Args:
        other: the tokenizer that is translated to; it has its own names for the begin and the end of a text.
    """

    def __init__(self, tokenizer: Any, other: Any) -> None:
        self._tokenizer, self.bytes_of = tokenizer, TokenBytes(tokenizer)
        ends = [(getattr(tokenizer, f"{end}_token_id"), getattr(other, f"{end}_token")) for end in ("bos", "eos")]
        self._names = {token: (name or "").encode() for token, name in ends if token is not None}

    def said(self, tokens: Iterable[int]) -> bytes:
        """The text of `tokens`, as the other tokenizer is to read it."""
        return b"".join(self._names[token] if token in self._names else self.bytes_of(token) for token in tokens)

    def ids_of(self, text: bytes) -> list[int] | None:
        """The tokens whose bytes are `text`; ``None`` where there are none, as in the middle of a character."""
        try:
            words = text.decode()
        except UnicodeDecodeError:
            return None
        for before in ("", "\n"):  # some tokenizers put a space before what they take for the begin of a text
            ids: list[int] = self._tokenizer(before + words, add_special_tokens=False)["input_ids"]
            for skipped in range(3):
                if b"".join(map(self.bytes_of, ids[skipped:])) == text:
                    return ids[skipped:]
        return None


def shared_ids(draft: Speech, target: Speech, num_draft: int, num_target: int) -> list[int]:
    """``[num_target]`` for each token of the target the draft model's with the same bytes, -1 where there is none."""
    by_bytes = {draft.bytes_of(token): token for token in reversed(range(num_draft))}
    return [by_bytes.get(text, -1) if (text := target.bytes_of(token)) else -1 for token in range(num_target)]


class TranslatedDrafter(DraftModelDrafter):
    """Drafts chains. The draft model reads the texts of rows in its own tokens.

    Args:
        speeches: of the draft model and of the target.
        shared: of `shared_ids`: choose among these tokens, with the noise of the target in rows that are sampled.
            ``None``: the text of the likeliest tokens is drafted.
    """

    def __init__(
        self,
        runner: ModelRunner,
        speeches: tuple[Speech, Speech],
        vocab_size: int,
        num_speculative_tokens: int,
        shared: Seq[int] | None = None,
    ) -> None:
        super().__init__(runner, runner.vocab_size if shared is None else vocab_size, num_speculative_tokens)
        self._own, self._target = speeches
        self._shared, self.has_own_ids = shared, shared is not None
        self._texts: dict[str, list[int]] = {}  # of each row, in the draft model's tokens
        self._marks: dict[str, list[tuple[int, int]]] = {}  # tokens of the target, and own ones, of the same text
        self._fed: dict[str, list[int]] = {}  # own tokens that are in the KV cache
        self._rows: dict[str, Row] = {}  # the target's, of the running draft

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        are_read = [self._read(row) for row in batch]
        self._settle([row.request_id for row in batch if row.request_id in self._fed])
        self._rows = {row.request_id: row for row in batch}
        shadows = [self._shadow(row) for row in batch]
        limits = [limit if can else 0 for limit, can in zip(budget, are_read, strict=True)]
        draft, chains = super().propose(Batch(tuple(shadows)), limits), list[list[int]]()
        for number, (row, limit) in enumerate(zip(batch, limits, strict=True)):
            chain = draft.tokens(number)
            tokens = chain if self._shared is None else [self._shared[token] for token in chain]
            if chain:
                self._fed[row.request_id] = [*self._texts[row.request_id], *tokens[:-1]]
            chains.append((self._translated(row, tokens) if self._shared is None else chain)[:limit])
        return Draft.from_chains(chains)

    def observe(self, outcome: Outcome) -> None:
        """Keep the KV of what is still the text of a row, and drop the rest."""
        for row in outcome.batch:
            self._read(row)
        self._settle([row.request_id for row in outcome.batch if row.request_id in self._fed])

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        super().release(request_ids)
        for request_id in request_ids:
            for kept in (self._texts, self._marks, self._fed, self._rows):
                kept.pop(request_id, None)

    def node_of(self, row: Row) -> Node:
        return super().node_of(row if self._shared is None else self._rows[row.request_id])

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._shared is None else on_device(self._shared, tokens.device)[tokens]

    def _columns(self, logits: torch.Tensor) -> torch.Tensor:
        if self._shared is None:
            return logits
        columns = on_device(self._shared, logits.device)
        return logits[:, columns.clamp(min=0)].masked_fill_(columns < 0, -torch.inf)

    def _read(self, row: Row) -> bool:
        """Bring the row's text up to date; returns whether it is: not in the middle of a character."""
        name, length = row.request_id, len(row.tokens)
        text, marks = self._texts.setdefault(name, []), self._marks.setdefault(name, [(0, 0)])
        if marks[-1][0] == length:
            return True
        kept = next(i for i in reversed(range(len(marks))) if marks[i][0] <= max(length - _AGAIN, 0))
        start, own_start = marks[kept]
        new = self._own.ids_of(self._target.said(row.tokens[start:]))
        if new is None or not (own_start or new):
            return False
        text[own_start:] = new
        marks[kept + 1 :] = [(length, len(text))]
        return True

    def _shadow(self, row: Row) -> Row:
        text = self._texts[row.request_id] or [0]
        return Row(Request(row.request_id, (text[0],), 1), text, len(text) + row.num_remaining)

    def _settle(self, names: Seq[str]) -> None:
        kv_lens = list[int]()
        for name in names:
            fed, text = self._fed[name], self._texts[name]
            same = next((i for i, (a, b) in enumerate(zip(fed, text, strict=False)) if a != b), len(fed))
            kv_lens.append(max(min(same, len(text) - 1), 0))
            del fed[kv_lens[-1] :]
        self._keep(names, kv_lens)

    def _translated(self, row: Row, drafted: Seq[int]) -> list[int]:
        """The draft in the target's tokens; a character that is not whole at its end is left out."""
        text = self._own.said(drafted).decode(errors="ignore").encode()
        end = list(row.tokens[-_AGAIN:])
        whole = self._target.ids_of(self._target.said(end) + text) or []
        return whole[len(end) :] if whole[: len(end)] == end else self._target.ids_of(text) or []
