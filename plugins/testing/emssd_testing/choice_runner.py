"""A runner without a model: it is told which token comes next. The conformance suites use it."""

from __future__ import annotations

import sys
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from emssd.attention import Kept, KVUsage, PackedInputs
from emssd.attention.trees import Parents
from emssd.model import ModelOutput, ModelRunner

__all__ = ["ChoiceRunner"]


class ChoiceRunner(ModelRunner):
    """Says for each row what a target would choose; it holds no KV, and everything fits."""

    device = torch.device("cpu")
    precision = torch.float32

    def __init__(self, vocab_size: int, max_model_len: int = sys.maxsize) -> None:
        self.vocab_size, self.max_model_len = vocab_size, max_model_len

    @abstractmethod
    def choices(self, request_id: str, length: int, drafted: Seq[int], tree: Parents) -> Seq[int]:
        """``[1 + len(drafted)]`` the target's choice after the newest token of a row, and after each drafted one.

        The row has `length` tokens without its draft. `tree` has the parents of the drafted tokens, also of a chain.
        """

    def run(self, packed: PackedInputs) -> ModelOutput:
        tokens, wanted = packed.input_ids.tolist(), packed.logit_rows.tolist()
        chosen = list[int]()
        trees = packed.trees or ((),) * packed.num_rows
        rows = zip(packed.request_ids, packed.kv_lens, packed.qo_indptr[1:], trees, strict=True)
        for request_id, kv_len, stop, tree in rows:
            num_wanted = bisect_left(wanted, stop) - len(chosen)
            if num_wanted:  # none for a piece of a prompt
                drafted = tokens[stop - num_wanted + 1 : stop]
                parents = tree or range(-1, len(drafted) - 1)
                chosen += self.choices(request_id, kv_len - len(drafted), drafted, parents)
        return ModelOutput(F.one_hot(torch.tensor(chosen, dtype=torch.int64), self.vocab_size).float())

    def commit(self, kept: Kept) -> None:
        pass

    def release(self, request_ids: Iterable[str]) -> None:
        pass

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return True

    @property
    def usage(self) -> KVUsage:
        return KVUsage()
