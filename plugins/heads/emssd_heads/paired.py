"""`PairedDrafter`: an EAGLE head drafts for the whole batch at once, trees that grow level by level, or chains.

Li et al. 2024, EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, §4; 2025, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from emssd.attention import Kept, PackedInputs
from emssd.attention.packed import on_device
from emssd.draft_models.growing_tree import GrowingRow, Level, nodes_of, pack_chain, pack_level
from emssd.draft_models.shapes import Shape
from emssd_heads.head import Head, Vocabulary
from emssd_heads.loading import TargetWeights
from emssd_heads.runner import HeadRunner
from emssd_heads.states import StatesDrafter

__all__ = ["PairedDrafter", "PairedHead"]


class PairedHead(Vocabulary, Head):
    """A head that reads pairs: the embedding of token ``i + 1``, then the feature of token ``i``, at position ``i``.

    The output there is for token ``i + 2``. A feature is made of the target's hidden states; in a draft, it is the
    head's own output for the token before.

    Args:
        hidden_size, vocab_size, names, draft_vocab_size: as of `Vocabulary`.
        max_len: the longest sequence; ``None`` for any.
    """

    def __init__(
        self,
        hidden_size: int,
        max_len: int | None,
        vocab_size: int,
        names: Container[str],
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, names, draft_vocab_size)
        self.input_size, self.max_len = 2 * hidden_size, max_len

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features ``[n, hidden_size]`` of the target's hidden states, ``[n, states * target_hidden_size]``."""
        return hidden


class PairedDrafter(StatesDrafter):
    """Drafts with a head that reads pairs, see `PairedHead`, and has a KV cache of its own.

    A row of `n` tokens has ``n - 1`` pairs, and the output after the last is for the first drafted token. A node of
    the tree is paired with the head's own output after its parent. When a draft is done, the KV of its nodes is
    dropped: the next draft computes accepted ones from the target's hidden states.

    Args:
        layers: the target's hidden states that the head reads, in this order.
        shape: of the trees; one child for each node makes chains.
    """

    def __init__(self, head: PairedHead, layers: Seq[int], shape: Shape, lent: TargetWeights) -> None:
        spec = replace(head.kv_cache_spec(lent.spec), trees=shape.width > 1)
        self._head, self._runner = head, HeadRunner(head, lent.make_cache(spec), compile=lent.compile)
        super().__init__(shape, layers, lent.target, self._runner, spec.max_model_len)
        self.target_ids = head.target_ids

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.features(hidden)

    def finish(self, rows: Seq[GrowingRow]) -> None:
        names, num_tokens = zip(*[(row.request_id, row.tree.num_tokens) for row in rows], strict=True)
        self._runner.commit(Kept(names, num_tokens))

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """Compute all pairs that are not cached."""
        packed, features = self.pack_new(rows)
        logits = self._run(packed, self._inputs(packed.input_ids, features))
        self._have_used(rows)
        return self._after_newest(rows, logits)

    def compute(self, level: Level) -> torch.Tensor:
        """Compute the nodes of a level, each beside the output after its parent."""
        nodes, packed = nodes_of(level), pack_level(level)
        parents = self._outputs([(row.request_id, row.tree.parents[node]) for row, node in nodes])
        logits = self._run(packed, self._inputs(packed.input_ids, parents))
        self._index = {(row.request_id, node): index for index, (row, node) in enumerate(nodes)}
        return logits

    def follow(self, rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        logits = self._run(pack_chain(rows, tokens, depth), self._inputs(tokens, self._newest(rows)))
        return self._after_newest(rows, logits)

    def follow_recorded(self, rows: Seq[GrowingRow], tokens: torch.Tensor, lengths: Seq[int]) -> torch.Tensor | None:
        def reads(columns: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return self._inputs(self._head.to_target(columns), hidden)

        packed, inputs = pack_chain(rows, tokens, 1), self._inputs(tokens, self._newest(rows))
        return self._runner.run_chain(packed, inputs, lengths, self.shape.temperature, self._projected, reads)

    def _newest(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """The outputs ``[r, hidden_size]`` of the latest pass for these rows of chains."""
        return self._outputs([(row.request_id, -1) for row in rows])

    def _outputs(self, nodes: Seq[tuple[str, int]]) -> torch.Tensor:
        """The latest outputs ``[n, hidden_size]`` after these nodes of rows; -1 stands for the newest token."""
        return self._hidden[on_device([self._index[node] for node in nodes], self._hidden.device)]

    def _after_newest(self, rows: Seq[GrowingRow], logits: torch.Tensor) -> torch.Tensor:
        """Note that the latest outputs are those after the newest token of each row."""
        self._index = {(row.request_id, -1): index for index, row in enumerate(rows)}
        return logits

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden, self._target.project)

    def _run(self, packed: PackedInputs, inputs: torch.Tensor) -> torch.Tensor:
        """Compute a step, and keep its outputs for the next level. Returns the logits after its ``logit_rows``."""
        self._hidden, logits = self._runner.run_to_logits(packed, inputs, self._projected)
        return logits

    def _inputs(self, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The head's inputs ``[nnz, 2 * hidden]``: tokens beside ``features [nnz, hidden]``."""
        return torch.cat(
            [self._head.embed(on_device(token_ids, features.device), self._target.embed), features], dim=-1
        )
