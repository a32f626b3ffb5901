"""Drafts by n-grams: `NGramCounts` counts what follows them, and `NGramDrafter` drafts the likeliest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from emssd.drafting.draft import Draft, Outcome, joined_trees
from emssd.drafting.drafter import Drafter
from emssd.drafting.growth import Tree, grow_tree
from emssd.sequences import Batch, Request, Row

_NONE: Mapping[int, int] = {}


class NGramCounts:
    """Counts what follows the n-grams of texts, up to `max_size` tokens long."""

    def __init__(self, max_size: int) -> None:
        self._max_size, self.num_tokens = max_size, 0
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def extend(self, tokens: Seq[int], start: int = 1) -> None:
        """Count ``tokens[start:]``, each after the n-grams that end before it."""
        for index in range(start, len(tokens)):
            token = tokens[index]
            for size in range(1, min(self._max_size, index) + 1):
                following = self._counts.setdefault(tuple(tokens[index - size : index]), {})
                following[token] = following.pop(token, 0) + 1  # the latest stands last
        self.num_tokens += max(0, len(tokens) - start)

    def after(self, ngram: tuple[int, ...]) -> Mapping[int, int]:
        """The counts of the tokens after `ngram`, the latest last."""
        return self._counts.get(ngram, _NONE)


class _Text:
    """The counts of one text, or of one prompt's texts; by request id, the requests and how far they are counted."""

    def __init__(self, max_size: int) -> None:
        self.counts = NGramCounts(max_size)
        self.counted: dict[str, tuple[Request, int]] = {}

    def extend(self, row: Row, start: int) -> None:
        """Count what is new of `row`, from `start` on. A row that was preempted is not new, one of its name is."""
        request, end = self.counted.get(row.request_id, (None, start))
        self.counts.extend(row.tokens, end if request is row.request else start)
        self.counted[row.request_id] = row.request, len(row.tokens)


class NGramDrafter(Drafter):
    """Drafts, per row, the likeliest continuations by the n-grams of its own text, and of others with its prompt.

    A token's chance is its share among all that followed the longest n-gram before it. With a memory for groups, the
    outputs of all rows with one prompt are counted together with the row's own, while they grow and until they are
    forgotten.

    Args:
        max_size, min_size: tokens of the n-grams that are looked for.
        num_nodes, depth, branches: of a draft, at most; see `grow_tree`.
        group_tokens: of the outputs that are remembered; those of the prompts that were decoded longest ago are
            forgotten first. 0: none.
    """

    def __init__(
        self, max_size: int, min_size: int, num_nodes: int, depth: int, branches: int, group_tokens: int = 0
    ) -> None:
        self.num_speculative_tokens, self.drafts_trees = num_nodes, branches > 1
        self._sizes, self._depth, self._branches = (max_size, min_size), depth, branches
        self._group_tokens = group_tokens
        self._texts: dict[str, _Text] = {}
        self.reset()

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = [self._tree(row, limit) for row, limit in zip(batch, budget, strict=True)]
        return joined_trees(rows, chains=not self.drafts_trees)

    def observe(self, outcome: Outcome) -> None:
        """Remember what is new of each row."""
        if not self._group_tokens:
            return
        for row in outcome.batch:
            prompt = row.request.prompt_ids
            group = self._groups.pop(prompt) if prompt in self._groups else _Text(self._sizes[0])
            self._groups[prompt] = group
            before = group.counts.num_tokens
            group.extend(row, len(prompt))
            self._num_remembered += group.counts.num_tokens - before
            if row.finish_reason is not None:
                del group.counted[row.request_id]
        while self._num_remembered > self._group_tokens:
            self._num_remembered -= self._groups.pop(next(iter(self._groups))).counts.num_tokens

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)

    def reset(self) -> None:
        self._groups: dict[tuple[int, ...], _Text] = {}  # by prompt, the latest last
        self._num_remembered = 0

    def more(self, token: int, chances: dict[int, float]) -> None:
        """Add to the `chances` of what follows `token`, the likeliest first; for drafters that know more."""

    def _tree(self, row: Row, budget: int) -> Tree:
        depth = min(self._depth, row.num_remaining - 1) if self.drafts_trees else self._depth
        if min(budget, depth) < 1:
            return Tree([], [], [])
        longest, shortest = self._sizes
        if (text := self._texts.get(row.request_id)) is None:
            text = self._texts[row.request_id] = _Text(longest)
        text.extend(row, 1)
        group = self._groups.get(row.request.prompt_ids)
        sources = [text.counts] if group is None else [group.counts, text.counts]

        def following(state: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
            chances = dict[int, float]()
            for size in range(min(longest, len(state)), shortest - 1, -1):
                if counts := _sum([source.after(state[-size:]) for source in sources]):
                    total = sum(counts.values())
                    chances = {token: counts[token] / total for token in reversed(counts)}
                    break
            self.more(state[-1], chances)
            ranked = sorted(chances.items(), key=lambda item: -item[1])  # of equals the latest comes first
            return [(token, chance, (*state, token)[-longest:]) for token, chance in ranked]

        newest, nodes = tuple(row.tokens[-longest:]), min(budget, self.num_speculative_tokens)
        return grow_tree(newest, following, num_nodes=nodes, depth=depth, branches=self._branches)


def _sum(counts: Seq[Mapping[int, int]]) -> dict[int, int]:
    """The sum of `counts`; tokens of the last of them stand last."""
    total = dict[int, int]()
    for some in counts:
        for token, count in some.items():
            total[token] = total.pop(token, 0) + count
    return total
