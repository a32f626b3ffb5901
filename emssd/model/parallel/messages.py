"""What process 0 tells the others, as integers: what a step computes, and what became of the KV of those before."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from emssd.attention import Kept, PackedInputs

__all__ = [
    "Kind",
    "Message",
    "Names",
    "kept_of",
    "kept_words",
    "messages_of",
    "object_of",
    "object_words",
    "packed_of",
    "packed_words",
    "words_of",
]


class Kind(IntEnum):
    """What a message is about."""

    END = 0
    LOAD = 1
    CACHE = 2
    RUN = 3
    COMMIT = 4
    RELEASE = 5
    ADOPT = 6
    PUBLISH = 7
    FORGET = 8
    DROP = 9
    HIDDEN = 10
    GATHER = 11


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: what it is about.
        number: of the model, or of the cache, that it is about.
        words: the rest of it.
    """

    kind: Kind
    number: int
    words: Seq[int] = ()


class Names:
    """Numbers in the place of request ids, from the first step of a request to its release."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def number(self, request_id: str) -> int:
        """The number of a request, which may be new."""
        if request_id not in self._numbers:
            self._numbers[request_id] = self._next
            self._next += 1
        return self._numbers[request_id]

    def forget(self, request_id: str) -> int:
        """The number of a request that has one, and has none from now on."""
        return self._numbers.pop(request_id)


def words_of(messages: Seq[Message]) -> list[int]:
    """Messages one behind the other."""
    words = list[int]()
    for kind, number, rest in messages:
        words += (kind, number, len(rest))
        words += rest
    return words


def messages_of(words: Seq[int]) -> Iterator[Message]:
    """What `words_of` was given."""
    place = 0
    while place < len(words):
        kind, number, length = words[place : place + 3]
        yield Message(Kind(kind), number, words[place + 3 : place + 3 + length])
        place += 3 + length


def packed_words(packed: PackedInputs, names: Names) -> list[int]:
    """A step, with all of its tokens; those that only a device knows are fetched."""
    token_ids = packed.input_ids
    if packed.drafted is not None:
        token_ids = token_ids.index_copy(0, packed.drafted.places, packed.drafted.token_ids.to(token_ids.device))
    trees = packed.trees or ((),) * packed.num_rows
    words = [packed.num_rows, packed.num_tokens, len(packed.logit_rows), packed.trees is not None]
    words += [names.number(request_id) for request_id in packed.request_ids]
    words += packed.qo_indptr
    words += packed.kv_lens
    words += map(len, trees)
    words += token_ids.tolist()
    words += packed.position_ids.tolist()
    words += packed.logit_rows.tolist()
    for tree in trees:
        words += tree
    return words


def packed_of(words: Seq[int]) -> PackedInputs:
    """The step of `packed_words`; its request ids are their numbers, as text."""
    reader = _Reader(words)
    num_rows, num_tokens, num_logits, has_trees = reader.take(4)
    request_ids = tuple(map(str, reader.take(num_rows)))
    qo_indptr, kv_lens = tuple(reader.take(num_rows + 1)), tuple(reader.take(num_rows))
    lengths = reader.take(num_rows)
    token_ids, positions, logit_rows = (torch.tensor(reader.take(n)) for n in (num_tokens, num_tokens, num_logits))
    trees = tuple(tuple(reader.take(length)) for length in lengths)
    return PackedInputs(
        request_ids=request_ids,
        input_ids=token_ids,
        position_ids=positions,
        qo_indptr=qo_indptr,
        kv_lens=kv_lens,
        logit_rows=logit_rows.to(torch.int64),  # none are no integers
        trees=trees if has_trees else None,
    )


def kept_words(kept: Kept, names: Names) -> list[int]:
    """What stays of each row's KV."""
    words = [len(kept.request_ids), bool(kept.sources)]
    words += [names.number(request_id) for request_id in kept.request_ids]
    words += kept.kv_lens
    for moved in kept.sources:
        words.append(len(moved))
        words += moved
    return words


def kept_of(words: Seq[int]) -> Kept:
    """What `kept_words` was given, as `packed_of`."""
    reader = _Reader(words)
    num_rows, moves = reader.take(2)
    names, kv_lens = tuple(map(str, reader.take(num_rows))), tuple(reader.take(num_rows))
    sources = tuple(tuple(reader.take(reader.take(1)[0])) for _ in range(num_rows)) if moves else ()
    return Kept(names, kv_lens, sources)


def object_words(value: Any) -> list[int]:
    """Any value that can be pickled, for what is seldom said."""
    data = pickle.dumps(value)
    words: list[int] = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype=np.int64).tolist()
    return [len(data), *words]


def object_of(words: Seq[int]) -> Any:
    """What `object_words` was given by a process of the same run."""
    length, *data = words
    return pickle.loads(np.array(data, dtype=np.int64).tobytes()[:length])


class _Reader:
    """Takes words in order."""

    def __init__(self, words: Seq[int]) -> None:
        self._words, self._place = words, 0

    def take(self, count: int) -> Seq[int]:
        """The next `count` of them."""
        taken = self._words[self._place : self._place + count]
        self._place += count
        return taken
