"""Causal language models draft for the whole batch, with KV of their own or the target's; how they are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from emssd.attention import Kept
from emssd.decoding.packing import pack
from emssd.draft_models.draft_cache import DraftCache
from emssd.draft_models.growing_tree import GrowingRow, GrowingTree, Level, pack_chain, pack_level
from emssd.draft_models.level_drafter import LevelDrafter
from emssd.draft_models.shapes import Shape
from emssd.drafting import Draft, DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.model import ModelRunner, RoundedRunner
from emssd.sampling.choice import Node
from emssd.sequences import Batch, Row

__all__ = ["ModelDrafter", "SharedDrafter", "load_draft_model", "shallow_runner"]


class RunnerDrafter(LevelDrafter):
    """Drafts with the model of `runner`. Ids beyond `vocab_size`, the target's, are never drafted."""

    def __init__(self, runner: ModelRunner, vocab_size: int, shape: Shape, cache: DraftCache | None = None) -> None:
        super().__init__(shape, vocab_size, cache)
        self._runner = runner

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        return self._columns(self._runner.run(pack(rows, Draft.empty(len(rows)))).logits)

    def compute(self, level: Level) -> torch.Tensor:
        packed = pack_level(level)
        return self._columns(self._runner.run(packed._replace(input_ids=self.own_ids(packed.input_ids))).logits)

    def follow(self, rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        return self._columns(self._runner.run(pack_chain(rows, self.own_ids(tokens), depth)).logits)

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's ids of drafted tokens, where it has others than the target."""
        return tokens

    def _columns(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, : self._vocab_size]


class SharedDrafter(RunnerDrafter):
    """Drafts for rows whose prompt the target has computed.

    The first pass computes their newest tokens, as verification will again. That overwrites the KV of its nodes.

    Args:
        runner: the rounded copy.
        vocab_size: the target's.
        shape: of the trees; one child for each node makes chains.
    """

    _runner: RoundedRunner

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        reach = self._runner.max_model_len - len(row.tokens)
        if row.num_uncached != 1 or reach <= 0 or not self._runner.is_attached:
            return None
        # The scheduler has made sure that `num_nodes` more tokens fit.
        most = min(self.shape.most_cached(num_nodes, depth), num_nodes, reach)
        return GrowingTree(len(row.tokens), num_nodes, min(depth, reach), most)

    def _num_cached(self, row: Row) -> int:
        return row.num_cached


class ModelDrafter(RunnerDrafter):
    """Drafts with a model. Only nodes that get children are computed; the KV of those that are accepted is kept.

    The first pass computes whatever the draft model has not cached yet: the prompt at first, later one token, or two
    after a draft that was accepted to its end, whose last token the draft model never saw. So the caches cannot drift
    apart.

    Args:
        runner: the draft model; its KV cache takes trees if `shape` has any.
        vocab_size: the target's; ids beyond it are never drafted.
        shape: of the trees; one child for each node makes chains.
    """

    has_own_ids = False
    """Whether the columns of the model's logits stand for other ids than the model's own."""

    _cache: DraftCache

    def __init__(self, runner: ModelRunner, vocab_size: int, shape: Shape) -> None:
        super().__init__(runner, vocab_size, shape, DraftCache(runner))
        self._trees: dict[str, GrowingTree] = {}  # of the latest draft

    def observe(self, outcome: Outcome) -> None:
        """Keep the KV of the accepted nodes, moved together, and drop the rest. Count what the target chose."""
        names, kv_lens, sources = list[str](), list[int](), list[tuple[int, ...]]()
        for row, accepted in zip(outcome.batch, outcome.accepted, strict=True):
            if (tree := self._trees.pop(row.request_id, None)) is None:
                continue
            if not tree.num_levels:  # a chain whose tokens the host never saw; the last was not computed
                kept = [*range(min(len(accepted), tree.max_cached))]
            else:
                tokens = row.tokens[tree.num_tokens :]
                self.shape.learn(_ranks(tree, tokens))
                # The newest token is the input of the next pass, also where the draft has it.
                kept = [tree.places[node] for node in tree.follow(tokens[:-1]) if node in tree.places]
            moved = kept != list(range(len(kept)))
            names.append(row.request_id)
            kv_lens.append(tree.num_tokens + len(kept))
            sources.append(tuple(tree.num_tokens + index for index in kept) if moved else ())
        self.shape.replan()
        self._keep(names, kv_lens, sources)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._cache.release(request_ids)
        for request_id in request_ids:
            self._trees.pop(request_id, None)

    def reset(self) -> None:
        self.shape.reset()

    def node_of(self, row: Row) -> Node:
        return self._with_known_bias(super().node_of(row))

    def _with_known_bias(self, node: Node) -> Node:
        """Ids beyond the draft model's vocabulary cannot be drawn, whatever is added to their logits."""
        size, bias = self._runner.vocab_size, node.params.logit_bias
        if all(token < size for token in bias):
            return node
        possible = {token: value for token, value in bias.items() if token < size}
        return replace(node, params=replace(node.params, logit_bias=possible))

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[GrowingRow]:
        self._trees = {}  # also if this draft fails
        return super()._begin(batch, budget)

    def _num_cached(self, row: Row) -> int:
        """All but one at most, as after a step that failed."""
        return min(self._cache.held.get(row.request_id, 0), len(row.tokens) - 1)

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        """Nothing beyond the draft model's length, nor after ids that only the target knows."""
        reach = self._runner.max_model_len - len(row.tokens)
        if reach <= 0 or max(row.tokens[self._num_cached(row) :]) >= self._runner.vocab_size:
            return None
        depth = min(depth, reach)
        return GrowingTree(len(row.tokens), num_nodes, depth, min(self.shape.most_cached(num_nodes, depth), reach))

    def finish(self, rows: Seq[GrowingRow]) -> None:
        self._trees = {row.request_id: row.tree for row in rows}

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        logits = super().catch_up(rows)
        self._cache.held |= {row.request_id: len(row.tokens) for row in rows}
        return logits

    def follow_recorded(self, rows: Seq[GrowingRow], tokens: torch.Tensor, lengths: Seq[int]) -> torch.Tensor | None:
        if self.has_own_ids:
            return None
        packed = pack_chain(rows, tokens, 1)
        return self._runner.run_chain(packed, lengths, self._vocab_size, self.shape.temperature)

    def _keep(self, names: Seq[str], kv_lens: Seq[int], sources: Seq[tuple[int, ...]] = ()) -> None:
        """Keep so many tokens' KV of these rows; `sources` as in `Kept`."""
        if names:
            self._cache.commit(Kept(tuple(names), tuple(kv_lens), tuple(sources)))


def _ranks(tree: GrowingTree, tokens: Seq[int]) -> list[int | None]:
    """The target's choices in a row's new `tokens`, as `Shape.learn` takes them."""
    ranks: list[int | None] = []
    for node, token in zip([-1, *tree.follow(tokens)], tokens, strict=False):
        if node not in tree.choices:
            break
        choices = tree.choices[node]
        ranks.append(choices.index(token) if token in choices else None)
    return ranks


def load_draft_model(path: str, context: DrafterContext, *, trees: bool = False) -> ModelRunner:
    """The draft model at `path`, with a KV cache that takes token trees or not. Tokenizers are compared first.

    Raises:
        ConfigError: it does not share the target's vocabulary.
    """
    check = partial(_check_vocabulary, path, context)
    runner, tokenizer = context.load_runner(path, trees=trees, accept=check)
    check(tokenizer, runner.vocab_size)  # the tokenizer again, for models that were loaded before
    return runner


def _check_vocabulary(path: str, context: DrafterContext, tokenizer: Any, vocab_size: int | None = None) -> None:
    if tokenizer is not None and context.tokenizer is not None:
        if tokenizer.get_vocab() == context.tokenizer.get_vocab():
            return  # vocabulary sizes of the models may still differ by unused padding ids
        what = f"its tokenizer ({len(tokenizer)} tokens) is not the target's ({len(context.tokenizer)} tokens)"
    elif vocab_size in (None, context.vocab_size):
        return
    else:
        what = f"its vocabulary has {vocab_size} tokens and the target's {context.vocab_size}"
    raise ConfigError(
        f"draft model {path!r} cannot draft for this target: {what}. Set drafter.path to a model that was trained "
        f"with the target's tokenizer, usually a smaller one of the same family. Where the drafter has "
        f"the option, drafter.vocabulary=auto lets one with another tokenizer draft by the text."
    )


def shallow_runner(context: DrafterContext, num_layers: int | None, *, trees: bool = False) -> ModelRunner:
    """The target's first layers, its final norm and its LM head, with a KV cache of their own.

    Args:
        context: lends the target.
        num_layers: how many; ``None`` for a quarter of them, rounded up.
        trees: whether the cache takes token trees.

    Raises:
        ConfigError: there is no target, or it has not so many layers.
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """
    target, spec = context.target, context.cache_spec
    if target is None or spec is None or context.make_cache is None:
        raise ConfigError("the drafter runs layers of the target, and there is no model to take them of")
    if num_layers is None:
        num_layers = -(-target.num_layers // 4)
    if not 1 <= num_layers <= target.num_layers:
        raise ConfigError(f"drafter.num_layers is {num_layers}; choose 1 to {target.num_layers}, as the target has")
    shallow = replace(spec, layers=spec.layers[:num_layers], trees=trees, prefix_caching=False)
    return target.first_layers(num_layers, context.make_cache(shallow))
