"""An EAGLE-3 head: a new one, training on its own outputs, and its files, a container of ``speculators``.

Li et al. 2025, EAGLE-3, arXiv 2503.01840, §3.2, "training-time test". Pair ``j`` is the embedding of token ``j + 1``
beside a feature of token ``j``, and the output after it is for token ``j + 2``. Pass 0 reads the target's features at
every pair, and its outputs are for first drafted tokens. Pass `k` reads, at every pair, what pass ``k - 1`` gave for
the pair before: its outputs are for the next drafted tokens. A draft after pair ``s`` goes through pair ``s + k`` in
pass `k`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd_heads.config import TargetSizes
from emssd_heads.eagle3 import Eagle3Config
from emssd_heads.eagle3.head import Eagle3Head
from emssd_heads.eagle3.variant import variant_of
from emssd_heads.files import Checkpoint, in_short
from emssd_heads.formats import unwrapped
from emssd_heads.loading import HeadFiles
from emssd_heads.options import TreeKind
from emssd_heads.training.options import Eagle3Options
from emssd_heads.training.shared import DraftLoss, Recipe, Teacher, choosable, divergence, save_files
from emssd_heads.training.texts import Text, frequent_tokens

__all__ = ["UnrolledLoss", "recipe", "unroll"]

_FORMAT = "0.9.0"  # the version of speculators whose format is written
_ROPE_THETA = 10000.0
_INITIAL = 0.02  # standard deviation of new weights


def recipe(options: Eagle3Options, target: TargetModel, _: object, dtype: torch.dtype) -> Recipe:
    """The recipe of a head. Raises ConfigError: options that do not go together with the target."""
    layers = options.hidden_layers or default_layers(len(target.layers))
    _check_layers(layers, target)
    teacher, config = Teacher(target, layers), head_config(options, target, layers)

    def begin(texts: Seq[Text]) -> tuple[DraftLoss, Callable[[Path], None]]:
        drafted = frequent_tokens(texts, target.vocab_size, options.draft_vocab_size)
        head = new_head(config, target, drafted, options)
        save = partial(save_head, head=head, config=config, vocab_size=target.vocab_size, dtype=dtype)
        return UnrolledLoss(head, teacher, options.depth), save

    drafter = Eagle3Config(path=options.output, tree=TreeKind.chain, depth=options.depth)
    return Recipe(begin, drafter, target.max_model_len)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads: those of EAGLE-3's authors, or of all depths of a shallow target."""
    authors = (2, num_layers // 2, num_layers - 3)
    if authors[0] < authors[1] < authors[2]:
        return authors
    spread = (1, (num_layers + 1) // 2, num_layers)
    return spread if len(set(spread)) == 3 else tuple(range(max(num_layers - 2, 0), num_layers + 1))


def _check_layers(layers: Seq[int], target: TargetModel) -> None:
    """Raises ConfigError: `target` has no such hidden states, or embeddings of another size."""
    num_layers, size = len(target.layers), target.model.config.get_text_config().hidden_size
    if len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"--hidden-layers is {','.join(map(str, layers))}; it must be different numbers from 0, what the first "
            f"layer gets, to {num_layers}, what the last one gives"
        )
    width = target.model.get_input_embeddings().weight.shape[1]
    if width != size:
        raise ConfigError(f"the target's embeddings have {width} elements, and its hidden states {size}")


def head_config(options: Eagle3Options, target: TargetModel, layers: Seq[int]) -> dict[str, Any]:
    """The ``config.json`` of a head that reads `layers` of `target`."""
    from transformers import LlamaConfig

    text = target.model.config.get_text_config()
    num_heads = options.num_heads or text.num_attention_heads
    num_kv_heads = options.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"--num-kv-heads is {num_kv_heads}; it must divide the head's {num_heads} attention heads")
    wide = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    decoder = {
        "vocab_size": target.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": options.intermediate_size or wide,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": target.layers[0].key_dim,
        "max_position_embeddings": target.max_model_len,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
    }
    try:
        values = LlamaConfig(**decoder).to_diff_dict()
    except Exception as error:  # Transformers checks values with errors of several libraries
        raise ConfigError(f"a head of these sizes cannot be: {in_short(error)}") from error
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _FORMAT,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": options.depth}],
            "verifier": {"name_or_path": options.model, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": values | {"model_type": "llama"},
        "draft_vocab_size": min(options.draft_vocab_size or target.vocab_size, target.vocab_size),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "tie_word_embeddings": False,
    }


def new_head(
    config: Mapping[str, Any], target: TargetModel, drafted: Seq[int] | None, options: Eagle3Options
) -> Eagle3Head:
    """A head with random weights, in float32 or wider. Its vocabulary projection begins as that of the target.

    It drafts the tokens with the target's ids `drafted`; ``None`` for all.
    """
    size = config["transformer_layer_config"]["hidden_size"]
    num_layers = len(config["eagle_aux_hidden_state_layer_ids"])
    sizes = TargetSizes(target.vocab_size, size, len(target.layers))
    names = {"fc.weight": "fc.weight"} | ({} if options.share_lm_head else {"lm_head.weight": "lm_head.weight"})
    shapes = {"fc.weight": torch.empty(size, num_layers * size, device="meta")}
    checkpoint = unwrapped(Checkpoint(options.output, Path(options.output), config, shapes))
    variant = variant_of(HeadFiles(checkpoint, sizes, names))
    head = Eagle3Head(variant, names, sizes).to(torch.promote_types(target.dtype, torch.float32))
    generator = torch.Generator().manual_seed(options.seed)
    for name, weight in head.named_parameters():
        if "norm" in name:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=_INITIAL, generator=generator)
    if drafted is not None:
        head.target_ids = torch.tensor(drafted)
    if head.lm_head is not None:
        rows = target.model.get_output_embeddings().weight.detach().cpu()
        with torch.no_grad():
            head.lm_head.weight.copy_(rows if drafted is None else rows[head.target_ids])
    return head.to(target.device)


class _ChainAttention:
    """Attention of all passes over `b` sequences of `m` pairs.

    In pass `k`, pair ``j`` sees the pairs that it sees while drafting: in pass 0 the committed ones up to
    ``j - k``, and in each pass ``i`` from 1 to `k` the drafted pair ``j - k + i``. Pairs below `k` stand for no draft,
    and their outputs mean nothing.
    """

    def __init__(self, head: Eagle3Head, shape: tuple[int, int]) -> None:
        self._specs, self._shape = head.specs, shape
        self._seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in head.specs]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spec, seen, num_pairs = self._specs[layer], self._seen[layer], self._shape[1]
        groups = spec.num_qo_heads // spec.num_kv_heads
        query, key, value = (
            rows.view(*self._shape, *rows.shape[1:]).transpose(1, 2) for rows in (query * spec.scale, key, value)
        )
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        seen.append((key, value))
        step = len(seen) - 1
        pair = torch.arange(num_pairs, device=query.device)
        committed = query @ seen[0][0].mT
        scores = [committed.masked_fill(pair > pair[:, None] - step, -math.inf)]
        drafted = [(key.roll(step - i, 2), value.roll(step - i, 2)) for i, (key, value) in enumerate(seen) if i]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in drafted]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = weights[..., :num_pairs] @ seen[0][1]
        for i, (_, value) in enumerate(drafted):
            out = out + weights[..., num_pairs + i, None] * value
        return out.transpose(1, 2).flatten(0, 1)


def unroll(head: Eagle3Head, embeds: torch.Tensor, features: torch.Tensor, num_passes: int) -> Iterator[torch.Tensor]:
    """The outputs of each pass, ``[b, m, hidden_size]``; those of pass `k` at pairs below `k` mean nothing.

    Args:
        embeds: ``[b, m, hidden_size]`` of token ``j + 1`` at pair ``j``.
        features: ``[b, m, hidden_size]`` of token ``j``, from the target.
    """
    positions = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
    attend = _ChainAttention(head, (embeds.shape[0], embeds.shape[1]))
    for _ in range(num_passes):
        outputs = head(torch.cat([embeds, features], dim=-1), positions, attend)
        yield outputs
        features = outputs.roll(1, 1)


class UnrolledLoss(DraftLoss):
    """The loss of a head, pass by pass, over the tokens that it can draft, where the target's own choice is one."""

    def __init__(self, head: Eagle3Head, teacher: Teacher, num_passes: int) -> None:
        super().__init__()
        self.head = head
        self._teacher, self._num_passes = teacher, num_passes

    def by_depth(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        lesson, head = self._teacher(input_ids), self.head
        dtype = head.norm.weight.dtype
        features = head.features(lesson.hidden[:, :-1].to(dtype))
        embeds, logits = lesson.embeds[:, 1:].to(dtype), lesson.logits[:, 1:]
        pair = torch.arange(embeds.shape[1], device=embeds.device)
        ends, begins = pair + 2 < num_tokens[:, None], num_prompt[:, None] - 1
        can_choose = choosable(logits, head.target_ids)
        for step, outputs in enumerate(unroll(head, embeds, features, self._num_passes)):
            counted = ends & (pair - step >= begins) & can_choose
            drafted = head.logits(outputs[counted], self._project) if counted.any() else outputs[:0, 0]
            yield divergence(drafted, logits[counted], head.target_ids)

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        borrowed = self._teacher.borrowed
        return borrowed.project(hidden.to(borrowed.dtype))


def save_head(folder: Path, head: Eagle3Head, config: Mapping[str, Any], vocab_size: int, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``, each whole or not at all."""
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in head.state_dict().items()}
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_files(folder, config, weights)
