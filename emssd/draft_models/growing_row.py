"""`GrowingRow`: a row that is drafted for, and `Level`: the nodes of a batch that one pass expands."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from emssd.attention import PackedInputs
from emssd.decoding.packing import pack_nodes
from emssd.draft_models.growing_tree import Expansion, GrowingTree
from emssd.sampling.choice import Node

__all__ = ["GrowingRow", "Level", "nodes_of", "pack_chain", "pack_level"]


@dataclass(frozen=True, slots=True)
class GrowingRow:
    """A row that is drafted for.

    Attributes:
        tokens: ``[n]``.
        node: where the target chooses the token after the newest one.
        tree: that grows after the newest token.
        num_cached: tokens that the drafter's KV cache holds.
    """

    request_id: str
    tokens: Seq[int]
    node: Node
    tree: GrowingTree
    num_cached: int = 0


Level = list[tuple[GrowingRow, list[Expansion]]]
"""The nodes that one pass expands, of each row. All nodes of a row are equally deep."""


def nodes_of(level: Level) -> list[tuple[GrowingRow, int]]:
    """The nodes of a level, in the order in which they are computed."""
    return [(row, node) for row, expansions in level for node, _ in expansions]


def pack_level(level: Level) -> PackedInputs:
    """The step that computes the nodes of a level."""
    return pack_nodes(
        [row.request_id for row, _ in level],
        torch.tensor([row.tree.token_ids[node] for row, node in nodes_of(level)]),
        [len(expansions) for _, expansions in level],
        [row.tree.num_tokens + len(row.tree.cached) for row, _ in level],
        [row.tree.cached_parents for row, _ in level],
    )


def pack_chain(rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> PackedInputs:
    """The step that computes the newest ``tokens [r]`` of chains of `depth` tokens."""
    kv_lens = [row.tree.num_tokens + depth for row in rows]
    return pack_nodes([row.request_id for row in rows], tokens, [1] * len(rows), kv_lens)
