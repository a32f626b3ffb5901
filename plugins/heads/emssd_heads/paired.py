"""`PairedDrafter`: an EAGLE head drafts for the whole batch at once, trees that grow level by level, or chains.

Li et al. 2024, EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, §4; 2025, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from emssd.attention import Kept, LayerSpec, PackedInputs
from emssd.attention.packed import on_device
from emssd.decoding.packing import pack_nodes
from emssd.draft_models.level_drafter import GrowingRow, Level, nodes_of, pack_chain, pack_level
from emssd.draft_models.shapes import Shape
from emssd_heads.head import Head
from emssd_heads.layers import HeadLayer
from emssd_heads.loading import TargetWeights
from emssd_heads.runner import HeadRunner
from emssd_heads.states import StatesDrafter
from emssd_heads.target import Embed, Project

__all__ = ["PairedDrafter", "PairedHead"]


class PairedHead(Head):
    """A head that reads pairs: the embedding of token ``i + 1`` beside the feature of token ``i``, at position ``i``.

    The output there is for token ``i + 2``. A feature is made of the target's hidden states; in a draft, it is the
    head's own output for the token before.

    Args:
        hidden_size: of its hidden states.
        max_len: the longest sequence; ``None`` for any.
        vocab_size: the target's.
        names: of the module's tensors that the checkpoint has.

    Attributes:
        embed_tokens: its own embeddings; ``None`` for the target's.
        target_ids: ``[draft_vocab_size]`` the target's ids of the tokens that it drafts; ``None``: it drafts them all.
    """

    layers: nn.ModuleList
    target_ids: torch.Tensor | None

    def __init__(self, hidden_size: int, max_len: int | None, vocab_size: int, names: Container[str]) -> None:
        super().__init__()
        self.input_size, self.max_len = 2 * hidden_size, max_len
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if "embed_tokens.weight" in names else None
        self.register_buffer("target_ids", None, persistent=False)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(cast("HeadLayer", layer).spec for layer in self.layers)

    def embed(self, token_ids: torch.Tensor, embed: Embed) -> torch.Tensor:
        """Embeddings ``[…, hidden_size]`` of token ids, from the head's own table or the target's."""
        return embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features ``[n, hidden_size]`` of the target's hidden states ``[n, states * target_hidden_size]``.

        Hidden states of one token stand beside each other, in the order in which the head names them.
        """
        return hidden

    @abstractmethod
    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Logits ``[n, draft_vocab_size]`` after pairs of which `forward` gave ``hidden [n, hidden_size]``."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns of `logits`, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]


class PairedDrafter(StatesDrafter):
    """Drafts with a head that reads pairs, see `PairedHead`, and has a KV cache of its own.

    A row of `n` tokens has ``n - 1`` pairs, and the output after the last is for the first drafted token. A node of
    the tree is paired with the head's own output after its parent. When a draft is done, the KV of its nodes is
    dropped: the next draft computes those that were accepted from the target's hidden states.

    Args:
        head: with its weights.
        layers: the target's hidden states that it reads, in this order.
        shape: of the trees; one child for each node makes chains.
        lent: what it borrows.
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
        features = [self._states[row.request_id].new(row.tree.num_tokens) for row in rows]
        lengths, token_ids = [len(new) for new in features], list[int]()
        for row, length in zip(rows, lengths, strict=True):
            token_ids += row.tokens[-length:]  # token i + 1 stands beside the feature of token i
        packed = pack_nodes(
            [row.request_id for row in rows], torch.tensor(token_ids), lengths, [row.tree.num_tokens for row in rows]
        )
        packed = replace(packed, logit_rows=torch.tensor(packed.qo_indptr[1:]) - 1)
        logits = self._run(packed, self._inputs(packed.input_ids, torch.cat(features)))
        self._places = {(row.request_id, -1): place for place, row in enumerate(rows)}
        self._have_used(rows)
        return logits

    def compute(self, level: Level) -> torch.Tensor:
        """Compute the nodes of a level, each beside the output after its parent."""
        nodes = nodes_of(level)
        parents = [self._places[row.request_id, row.tree.parents[node]] for row, node in nodes]
        packed = pack_level(level)
        logits = self._run(
            packed, self._inputs(packed.input_ids, self._hidden[on_device(parents, self._hidden.device)])
        )
        self._places = {(row.request_id, node): place for place, (row, node) in enumerate(nodes)}
        return logits

    def follow(self, rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        logits = self._run(pack_chain(rows, tokens, depth), self._inputs(tokens, self._newest(rows)))
        self._places = {(row.request_id, -1): place for place, row in enumerate(rows)}
        return logits

    def follow_recorded(self, rows: Seq[GrowingRow], tokens: torch.Tensor, lengths: Seq[int]) -> torch.Tensor | None:
        def reads(columns: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return self._inputs(self._head.to_target(columns), hidden)

        packed, inputs = pack_chain(rows, tokens, 1), self._inputs(tokens, self._newest(rows))
        return self._runner.run_chain(packed, inputs, lengths, self.shape.temperature, self._projected, reads)

    def _newest(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """The outputs ``[r, hidden_size]`` of the latest pass for these rows of chains."""
        return self._hidden[on_device([self._places[row.request_id, -1] for row in rows], self._hidden.device)]

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
