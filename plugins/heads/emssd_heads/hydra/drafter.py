"""Drafts with Hydra heads for the whole batch at once: trees that grow level by level, or chains.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from emssd.attention import Kept, on_device
from emssd.draft_models import GrowingRow, Level, Shape, nodes_of
from emssd_heads import LAST_NORMED, DecoderConfig, Format, HeadFiles, HeadRunner, LayerHead, Loaded, StatesDrafter
from emssd_heads.config import TargetSizes
from emssd_heads.loading import TargetWeights
from emssd_heads.residual import ResidualHeads, counted

__all__ = ["HydraDrafter", "load_hydra"]

_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = "prefix_embeding_layer."  # as the authors write it


class HydraDrafter(StatesDrafter):
    """Drafts with heads that read a hidden state, and all tokens from the newest one to a node.

    The hidden state is that of the token before the newest one: the target chose the newest token from it. A prefix
    layer's output there takes its place. The head at 0 reads the newest token too, and gives the first drafted ones.
    """

    caches_nodes = False

    def __init__(self, loaded: Loaded[ResidualHeads], shape: Shape, lent: TargetWeights) -> None:
        self._heads, self._runner, spec = loaded.head, None, lent.spec
        if loaded.prefix is not None:
            spec = loaded.prefix.kv_cache_spec(replace(spec, trees=False))
            self._runner = HeadRunner(loaded.prefix, lent.make_cache(spec), compile=lent.compile)
        super().__init__(shape, loaded.layers, lent.target, self._runner, spec.max_model_len)
        self.reads_all = self._runner is not None

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        self._hidden, self._index = self._read(rows), {row.request_id: index for index, row in enumerate(rows)}
        return self.compute([(row, [(-1, ())]) for row in rows])

    def compute(self, level: Level) -> torch.Tensor:
        hidden, paths = self._hidden, [[row.tokens[-1], *row.tree.path(node)] for row, node in nodes_of(level)]
        ids = torch.tensor(paths)
        embeds = self._target.embed(on_device(ids.flatten(), hidden.device)).view(len(ids), -1)
        index = on_device([self._index[row.request_id] for row, _ in nodes_of(level)], hidden.device)
        logits: torch.Tensor = self._heads(ids.shape[1] - 1, torch.cat([hidden[index], embeds], dim=-1))
        return logits

    def _read(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """``[r, hidden]`` what the heads read of each row: a state as it is, or the prefix layer's output there."""
        packed, states = self.pack_new(rows)
        if self._runner is None:
            return states
        hidden = self._runner.run(packed, states)
        self._runner.commit(Kept(packed.request_ids, packed.kv_lens))
        self._have_used(rows)
        return hidden


def load_hydra(path: str, target: TargetSizes, target_config: Mapping[str, Any]) -> Loaded[ResidualHeads]:
    """Load heads of the architectures ``mlp`` and ``prefix-mlp`` (Hydra++), with a layer of the target's sizes.

    The head for level `h` of a draft reads a hidden state and the embeddings of the ``h + 1`` tokens before.
    """
    files = HeadFiles.read(path, target, Format.hydra)
    layer = _layer(files)
    names = _names(files)
    of_heads = {new: name for new, name in names.items() if not new.startswith(_PREFIX)}
    num_heads, num_layers = counted(files, of_heads)
    size, vocab_size = target.hidden_size, target.vocab_size
    reads = [(head + 2) * size for head in range(num_heads)]
    heads = files.filled(lambda: ResidualHeads(reads, num_layers, size, vocab_size, of_heads), of_heads)
    prefix, rotary = None, list[str]()
    if files.config.get("hydra_head_arch") == "prefix-mlp" or len(of_heads) < len(names):
        decoder = DecoderConfig.read({**target_config, "num_hidden_layers": 1}, path)
        rest = {new.removeprefix(_PREFIX): name for new, name in names.items() if new.startswith(_PREFIX)}
        prefix = files.filled(lambda: LayerHead(decoder, rest), rest)
        rotary.append(f"rotary base {decoder.rope['rope_theta']:g}, the target's")
    states = "last hidden state, behind its final norm" if layer < 0 else f"residual stream before layer {layer}"
    described = (
        f"{num_heads} Hydra heads of {num_layers} layers{' behind a prefix layer' if prefix is not None else ''}, "
        f"read from {files.checkpoint.source.name}",
        f"reads the target's {states}",
        *rotary,
    )
    return Loaded(heads, (layer,), described, prefix)


def _layer(files: HeadFiles) -> int:
    """The hidden state that is read."""
    config, num_layers = files.config, files.target.num_layers
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise files.cannot(f"its heads are of the architecture {kind!r}; supported are mlp and prefix-mlp")
    if config.get("grounded_heads") is False:
        raise files.cannot("its heads do not read drafted tokens (grounded_heads is false), which Medusa's do too")
    offset = config.get("hidden_state_offset") or 0
    if not isinstance(offset, int) or not 0 <= offset <= num_layers:
        raise files.cannot(f"its hidden_state_offset is {offset!r}, and the target has {num_layers} layers")
    return num_layers - offset if offset else LAST_NORMED


def _names(files: HeadFiles) -> dict[str, str]:
    """The tensors of the heads. Some layers have modules without weights between them, so that numbers have gaps."""
    numbers: dict[str, set[int]] = {}
    for name in files.checkpoint.tensors:
        if layer := _MLP.match(name):
            numbers.setdefault(layer[1], set()).add(int(layer[2]))

    def new_name(name: str) -> str | None:
        if layer := _MLP.match(name):
            index = sorted(numbers[layer[1]]).index(int(layer[2]))
            return f"layers.{layer[1]}.{index}.{layer[3]}"
        if projection := _PROJECTION.match(name):
            return f"projections.{projection[1]}.{projection[2]}"
        return None if name == f"{_PREFIX}embed_tokens.weight" else name  # hidden states take the place of embeddings

    return files.renamed(new_name)
