"""Faults of drafters with trained heads, which read the target's hidden states."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

PAIRED = "emssd/heads/paired.py"
EAGLE3 = "plugins/eagle3/emssd_eagle3/"
MEDUSA = "plugins/medusa/emssd_medusa/drafter.py"
HYDRA = "plugins/hydra/emssd_hydra/"
DFLASH = "plugins/dflash/emssd_dflash/"

FAULTS = (
    Fault(
        "a token stands beside its own hidden state, and not that of the one before",
        "eagle",
        PAIRED,
        "token_ids += row.tokens[-length:]",
        "token_ids += row.tokens[-length - 1 : -1]",
        ("tests/heads/test_paired.py", "plugins/eagle", "plugins/eagle3", "plugins/mtp"),
    ),
    Fault(
        "a node is paired with what the head said of another",
        "eagle",
        PAIRED,
        "for place, (row, node) in enumerate(nodes_of(before))}",
        "for place, (row, node) in enumerate(nodes_of(before))} | {(row.request_id, -1): 0 for row, _ in before}",
        ("tests/heads/test_paired_trees.py", "tests/heads/test_paired.py"),
    ),
    Fault(
        "the KV of drafted nodes is kept",
        "eagle",
        PAIRED,
        "tuple(row.pairs.num_used for row in rows)))",
        "tuple(row.pairs.num_used + len(row.tree.cached) for row in rows)))",
        ("tests/heads/test_paired.py", "tests/heads/test_paired_trees.py"),
    ),
    Fault(
        "hidden states of a row that is gone are kept",
        "eagle",
        PAIRED,
        "            self._pairs.pop(request_id, None)\n",
        "",
        ("tests/heads/test_paired.py", "tests/heads/test_paired_trees.py"),
    ),
    Fault(
        "the hidden state before the newest token is used twice",
        "eagle",
        "emssd/heads/states.py",
        "self.start, self.num_used = num_tokens - 1, num_tokens",
        "self.start, self.num_used = num_tokens - 1, num_tokens - 1",
        ("tests/heads/test_paired.py", "plugins/medusa", "plugins/hydra"),
    ),
    Fault(
        "the first layer norms its features twice",
        "eagle",
        "plugins/eagle/emssd_eagle/head.py",
        "normed=i > 0)",
        "normed=True)",
        ("plugins/eagle",),
    ),
    Fault(
        "embeddings and features change places",
        "eagle3",
        EAGLE3 + "head.py",
        "torch.cat([self.input_layernorm(embeds), normed], dim=-1)",
        "torch.cat([normed, self.input_layernorm(embeds)], dim=-1)",
        ("plugins/eagle3",),
    ),
    Fault(
        "columns of a head's own vocabulary are taken for the target's ids",
        "eagle3",
        "emssd/heads/choices.py",
        "target_ids[torch.tensor(columns, device=target_ids.device)].tolist()",
        "columns",
        ("plugins/eagle3", "tests/heads", "plugins/medusa"),
    ),
    Fault(
        "a level drafts from the mask of the level before",
        "eagle3",
        EAGLE3 + "parallel.py",
        "(row.request_id, len(row.tree.way(node)))",
        "(row.request_id, len(row.tree.way(node)) - 1)",
        ("plugins/eagle3",),
    ),
    Fault(
        "a head's guesses are taken for those of the first row",
        "medusa",
        MEDUSA,
        "places = [len(path) * num_rows + row.place for row, path in asked]",
        "places = [len(path) * num_rows for row, path in asked]",
        ("plugins/medusa",),
    ),
    Fault(
        "the choice at a level is that of the head before",
        "medusa",
        MEDUSA,
        "nodes = [behind(row.node, len(path), path) for row, path in asked]\n        tokens",
        "nodes = [behind(row.node, max(0, len(path) - 1), path[1:]) for row, path in asked]\n        tokens",
        ("plugins/medusa",),
    ),
    Fault(
        "the tokens on the way to a node stand before the newest one",
        "hydra",
        HYDRA + "drafter.py",
        "torch.tensor([[row.newest, *path] for row, path in paths])",
        "torch.tensor([[*path, row.newest] for row, path in paths])",
        ("plugins/hydra",),
    ),
    Fault(
        "the prefix layer sees its hidden states a second time",
        "hydra",
        HYDRA + "drafter.py",
        "            row.states.used(row.num_computed)\n        return hidden",
        "            row.states.used(row.num_computed)\n            row.states.num_used -= 1\n        return hidden",
        ("plugins/hydra",),
    ),
    Fault(
        "the norms of embeddings and features change places",
        "mtp",
        "plugins/mtp/emssd_mtp/head.py",
        "torch.cat([self.enorm(embeds), self.hnorm(features)], dim=-1)",
        "torch.cat([self.hnorm(embeds), self.enorm(features)], dim=-1)",
        ("plugins/mtp",),
    ),
    Fault(
        "drafts are read from a block a place too early",
        "dflash",
        DFLASH + "drafter.py",
        "at * size + lead + slot for at, row",
        "at * size + slot for at, row",
        ("plugins/dflash",),
    ),
    Fault(
        "a block stands a position too far",
        "dflash",
        DFLASH + "runner.py",
        "for place in range(row.start, row.start + self._size)]",
        "for place in range(row.start + 1, row.start + 1 + self._size)]",
        ("plugins/dflash",),
    ),
    Fault(
        "a token of a block sees those before it alone",
        "dflash",
        DFLASH + "runner.py",
        "queries = [place + self._size for place in blocks] if self._doubled else blocks",
        "queries = blocks",
        ("plugins/dflash",),
    ),
)
