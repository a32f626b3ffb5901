"""Faults of drafters with trained heads, which read the target's hidden states."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

PAIRED = "emssd/drafters/paired.py"
LEVELS = "emssd/drafters/levels.py"
EAGLE3 = "plugins/eagle3/emssd_eagle3/"
MEDUSA = "plugins/medusa/emssd_medusa/drafter.py"
HYDRA = "plugins/hydra/emssd_hydra/"
DFLASH = "plugins/dflash/emssd_dflash/"
_DENSE = ("plugins/dflash/tests/test_block_head.py::test_every_draft_is_that_of_a_dense_pass",)
_CONTAINER = ("plugins/dflash/tests/test_block_head.py::test_a_container_of_speculators_holds_the_same_head",)

FAULTS = (
    Fault(
        "sampled rows are drafted for as greedy ones",
        "draft_model",
        LEVELS,
        "self._all_greedy = False not in [",
        "self._all_greedy = None not in [",
        (
            "plugins/draft_model/tests/test_sampled_drafts.py::test_at_every_level_of_its_trees_the_likeliest_token_is_accepted",
        ),
    ),
    Fault(
        "a container's numbers of streams are taken for those of outputs",
        "dflash",
        "emssd/drafters/heads/containers.py",
        "[each - 1 for each in ids]",
        "list(ids)",
        _CONTAINER,
    ),
    Fault(
        "a block drafter's own columns are taken for the target's ids",
        "dflash",
        DFLASH + "drafter.py",
        "self.target_ids = lane.head.target_ids",
        "pass",
        _CONTAINER,
    ),
    Fault(
        "a convolution mixes the token after in place of the one before",
        "dflash",
        DFLASH + "head.py",
        "F.pad(blocks[:, : self._block_size - tap], (0, 0, tap, 0))",
        "F.pad(blocks[:, tap:], (0, 0, 0, tap))",
        _DENSE,
    ),
    Fault(
        "a slot remembers nothing of the slots before",
        "dflash",
        DFLASH + "drafter.py",
        "self._memory.get(row.request_id, follows.start())",
        "follows.start()",
        _DENSE,
    ),
    Fault(
        "a refiner reads the tokens of the slots themselves",
        "dflash",
        DFLASH + "refining.py",
        "before = torch.cat([first[:, None], chosen[:, :-1]], dim=1)",
        "before = chosen",
        _DENSE,
    ),
    Fault(
        "a token stands beside its own hidden state, and not that of the one before",
        "eagle",
        PAIRED,
        "token_ids += row.tokens[-length:]",
        "token_ids += row.tokens[-length - 1 : -1]",
        ("tests/heads/test_paired.py::test_a_head_that_is_always_right_is_always_accepted",),
    ),
    Fault(
        "a node is paired with what the head said of another",
        "eagle",
        PAIRED,
        "on_device(parents, self._hidden.device)",
        "on_device(parents[::-1], self._hidden.device)",
        ("tests/heads/test_paired_trees.py::test_trees_are_those_of_the_papers",),
    ),
    Fault(
        "hidden states of a row that is gone are kept",
        "eagle",
        "emssd/drafters/states.py",
        "            self._states.pop(request_id, None)\n",
        "",
        (
            "tests/heads/test_paired.py::test_later_rows_of_the_same_names_have_nothing_of_earlier_ones",
            "tests/heads/test_paired.py::test_rows_that_are_preempted_begin_anew",
        ),
    ),
    Fault(
        "the first layer norms its features twice",
        "eagle",
        "plugins/eagle/emssd_eagle/head.py",
        "normed=i > 0)",
        "normed=True)",
        ("plugins/eagle/tests/test_eagle_head.py::test_rows_with_trees_run_together_as_each_way_alone",),
    ),
    Fault(
        "embeddings and features change places",
        "eagle3",
        EAGLE3 + "head.py",
        "torch.cat([self.input_layernorm(embeds), normed], dim=-1)",
        "torch.cat([normed, self.input_layernorm(embeds)], dim=-1)",
        ("plugins/eagle3/tests/test_head.py::test_a_head_of_each_layout_gives_what_the_formulas_say",),
    ),
    Fault(
        "columns of a head's own vocabulary are taken for the target's ids",
        "eagle3",
        LEVELS,
        "columns = [list(map(ids.__getitem__, row)) for row in columns]",
        "pass",
        ("plugins/medusa/tests/test_medusa_drafter.py::test_heads_of_some_tokens_only",),
    ),
    Fault(
        "a level drafts from the mask of the level before",
        "eagle3",
        LEVELS,
        "self._starts[row.request_id] + row.tree.num_levels",
        "self._starts[row.request_id] + max(0, row.tree.num_levels - 1)",
        ("tests/heads/test_paired_trees.py::test_trees_are_those_of_the_papers",),
    ),
    Fault(
        "a head's guesses are taken for those of the first row",
        "medusa",
        MEDUSA,
        "logits[: row.tree.depth, place]",
        "logits[: row.tree.depth, 0]",
        ("plugins/medusa/tests/test_medusa_drafter.py::test_heads_that_are_always_right_are_always_accepted",),
    ),
    Fault(
        "the choice at a level is that of the head before",
        "medusa",
        LEVELS,
        "nodes = [behind(row.node, depth) for row in rows",
        "nodes = [behind(row.node, max(0, depth - 1)) for row in rows",
        ("plugins/medusa/tests/test_medusa_drafter.py::test_heads_that_are_always_right_are_always_accepted",),
    ),
    Fault(
        "the tokens on the way to a node stand before the newest one",
        "hydra",
        HYDRA + "drafter.py",
        "[row.tokens[-1], *row.tree.path(node)]",
        "[*row.tree.path(node), row.tokens[-1]]",
        ("plugins/hydra/tests/test_hydra_drafter.py::test_drafts_are_those_of_the_formulas",),
    ),
    Fault(
        "the norms of embeddings and features change places",
        "mtp",
        "plugins/mtp/emssd_mtp/head.py",
        "torch.cat([self.enorm(embeds), self.hnorm(features)], dim=-1)",
        "torch.cat([self.hnorm(embeds), self.enorm(features)], dim=-1)",
        ("plugins/mtp/tests/test_mtp_layouts.py::test_rows_pieces_and_trees_are_as_the_formulas_say",),
    ),
    Fault(
        "drafts are read from a block a place too early",
        "dflash",
        DFLASH + "drafter.py",
        "at * size + lead + slot for at, row",
        "at * size + slot for at, row",
        ("plugins/dflash/tests/test_block_head.py::test_every_draft_is_that_of_a_dense_pass",),
    ),
    Fault(
        "a block stands a position too far",
        "dflash",
        DFLASH + "lane.py",
        "for place in range(row.start, row.start + self._size)]",
        "for place in range(row.start + 1, row.start + 1 + self._size)]",
        ("plugins/dflash/tests/test_block_head.py::test_every_draft_is_that_of_a_dense_pass",),
    ),
    Fault(
        "a token of a block sees those before it alone",
        "dflash",
        DFLASH + "lane.py",
        "seconds += range(first + self.num_slots - self._size, first + self.num_slots)",
        "seconds += range(first, first + self._size)",
        ("plugins/dflash/tests/test_block_head.py::test_every_draft_is_that_of_a_dense_pass",),
    ),
)
