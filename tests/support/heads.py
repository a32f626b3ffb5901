"""Shared by tests of trained heads: files in published layouts, and decoder layers written anew, dense and naive."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import pytest
import torch
from emssd_heads import HeadRunner
from emssd_heads.head import Head
from safetensors.torch import save_file

from emssd.attention import Kept, KVCacheSpec
from emssd.attention.trees import Parents, depths, path
from emssd.decoding.caches import make_backend
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from tests.support.trees import ways

CPU = torch.device("cpu")
_FOLDERS = TemporaryDirectory(prefix="emssd-tests-")
"""Where files lie that several tests read. It goes when the process ends."""
Weights = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
"""The config of a small decoder layer of Llama's kind."""


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Random float32 weights, large enough that each matters; those of norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.3)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def blank_weights(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Zeros; ones for norms."""
    return {name: torch.full(shape, float("norm" in name)) for name, shape in shapes.items()}


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random inputs, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(is_: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Hold outputs to what formulas give; only the order of sums may differ."""
    torch.testing.assert_close(is_, wanted, rtol=rtol, atol=atol)


def refusal(load: Callable[[], object]) -> str:
    """The one sentence that a head is refused with."""
    with pytest.raises(ConfigError) as raised:
        load()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    return str(raised.value)


def changed(weights: Weights, change: Mapping[str, torch.Tensor | None]) -> Weights:
    """`weights` with these tensors; ``None`` takes one away."""
    return {name: weight for name, weight in (weights | change).items() if weight is not None}


def layer_weights(prefix: str, config: Mapping[str, Any], input_size: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a decoder layer of Llama's kind, without its input norm."""
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim", hidden // heads)
    return {
        f"{prefix}self_attn.q_proj.weight": (heads * dim, input_size),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * dim, input_size),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * dim, input_size),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def eagle3_shapes(config: Mapping[str, Any], num_states: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of an EAGLE-3 head of one layer that reads so many hidden states of its own width."""
    size = config["hidden_size"]
    return {
        "fc.weight": (size, num_states * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        **layer_weights("midlayer.", config, 2 * size),
        "norm.weight": (size,),
        "lm_head.weight": (config["draft_vocab_size"], size),
    }


def new_folder() -> Path:
    return Path(mkdtemp(dir=_FOLDERS.name))


def write_head(folder: Path, config: Mapping[str, Any], weights: Weights, file: str = "model.safetensors") -> str:
    """Write a checkpoint with its weights in `file`. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    return str(folder)


def dense_rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def dense_layer(
    weights: Weights,
    prefix: str,
    config: Mapping[str, Any],
    residual: torch.Tensor,
    attended: torch.Tensor,
    positions: Seq[int],
    context: torch.Tensor | None = None,
    visible: Callable[[int], slice] = lambda query: slice(query + 1),
    mixed: Callable[[str, torch.Tensor], tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = (
        lambda part, x: (x, lambda out: out)
    ),
) -> torch.Tensor:
    """A layer for one sequence: ``residual [n, H]`` plus attention over ``attended [n, D]``, plus the MLP.

    Keys and values are also made of ``context [c, D]``, which comes before. A query sees the keys `visible`. The input
    of each part of the layer is `mixed`, and its output by the function that comes with that.
    """
    attended, finish = mixed("attention", attended)
    read = attended if context is None else torch.cat([context, attended])
    w = {name.removeprefix(prefix): piece.double() for name, piece in weights.items() if name.startswith(prefix)}
    heads = config["num_attention_heads"]
    kv_heads, eps = config.get("num_key_value_heads", heads), config["rms_norm_eps"]

    def by_head(x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        out = x @ w[f"self_attn.{name}_proj.weight"].T
        if f"self_attn.{name}_proj.bias" in w:
            out = out + w[f"self_attn.{name}_proj.bias"]
        out = out.reshape(len(x), count, -1)
        norm = w.get(f"self_attn.{name}_norm.weight")
        return out if norm is None else dense_rms(out, norm, eps)

    theta = config.get("rope_theta", 10000.0)
    q = turned(by_head(attended, "q", heads), positions[-len(attended) :], theta)
    k, v = turned(by_head(read, "k", kv_heads), positions, theta), by_head(read, "v", kv_heads)
    rows = []
    for i in range(len(attended)):
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = k[visible(i), group] @ q[i, head] / q.shape[-1] ** 0.5
            out.append(torch.softmax(scores, 0) @ v[visible(i), group])
        rows.append(torch.cat(out))
    hidden = residual + finish(torch.stack(rows) @ w["self_attn.o_proj.weight"].T)
    x, finish = mixed("mlp", dense_rms(hidden, w["post_attention_layernorm.weight"], eps))
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return hidden + finish((gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T)


def turned(x: torch.Tensor, positions: Seq[int], theta: float) -> torch.Tensor:
    """Rotary positions: element ``j`` and element ``j + dim / 2`` of a head are a pair. Frequencies are float32."""
    dim = x.shape[-1]
    frequencies = (1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)).double()
    angles = torch.tensor(positions).double()[:, None, None] * frequencies
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one row, by PyTorch."""
    by_head = [rows.transpose(0, 1)[None] for rows in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


class _Row(NamedTuple):
    request_id: str
    tokens: Seq[int]
    num_cached: int


Rows = Seq[tuple[torch.Tensor, int, torch.Tensor, Parents]]


def drawn_rows(input_size: int) -> Rows:
    """Rows for `run_ragged`, of different lengths and trees."""
    sizes = ((9, 2, (-1, -1, 0, 0, 1, 3)), (3, 1, (-1, 0, 1)), (6, 5, (-1, -1, -1, 2, 2)))
    return [
        (numbers(length, input_size, seed=row), first, numbers(len(tree), input_size, seed=10 + row), tree)
        for row, (length, first, tree) in enumerate(sizes)
    ]


def assert_ragged(
    head: Head, rows: Rows, dense: Callable[[torch.Tensor], torch.Tensor], backend: Any = "ragged", **close: float
) -> None:
    """Hold all that `run_ragged` gives to ``dense`` outputs ``[n, H]`` of each way's inputs alone."""
    for (inputs, _, nodes, tree), (last, outputs, again) in zip(rows, run_ragged(head, rows, backend), strict=True):
        chains = [inputs, *(torch.cat([inputs, nodes[way]]) for way in ways(tree))]
        chains.append(torch.cat([chains[-1], nodes[:1]]))
        for is_, chain in zip((last, *outputs, again), chains, strict=True):
            assert_same(is_, dense(chain)[-1], **close)


def run_ragged(
    head: Head, rows: Rows, backend: Any = "ragged", *, compile: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run sequences of different lengths together: a first piece, the rest, a tree level by level; commit; the rest.

    Args:
        head: to run.
        rows: for each its inputs ``[n, input_size]``, how many of them are in the first piece, inputs of tree nodes
            ``[m, input_size]``, and their parents. The way to the last node is committed.
        backend: by name.
        compile: run a compiled program.

    Returns:
        For each row the output after its last input, those of the tree nodes, and the output of the first tree input
        given once more after the committed way.
    """
    spec = KVCacheSpec((), torch.float64, CPU, len(rows), 64, continuous=backend == "ragged", trees=True)
    runner = HeadRunner(head, make_backend(head.kv_cache_spec(spec), backend, Registry()), compile=compile)
    names = [f"row {i}" for i in range(len(rows))]

    def step(starts: Seq[int], inputs: Seq[torch.Tensor]) -> torch.Tensor:
        members = [
            _Row(name, [0] * (start + len(piece)), start)
            for name, start, piece in zip(names, starts, inputs, strict=True)
        ]
        return runner.run(pack(members, Draft.empty(len(rows))), torch.cat(list(inputs)))

    step([0] * len(rows), [piece[:first] for piece, first, _, _ in rows])
    last = step([first for _, first, _, _ in rows], [piece[first:] for piece, first, _, _ in rows])
    nodes = _grow(runner, names, rows)
    kept, sources = [], []
    for inputs, _, _, parents in rows:
        way = [len(inputs) + node for node in path(parents, len(parents) - 1)]
        kept.append(len(inputs) + len(way))
        sources.append(tuple(way))
    runner.commit(Kept(tuple(names), tuple(kept), tuple(sources)))
    again = step(kept, [piece[:1] for _, _, piece, _ in rows])
    runner.release(names)
    assert runner.usage.held == 0
    return list(zip(last, nodes, again, strict=True))


def _grow(runner: HeadRunner, names: Seq[str], rows: Rows) -> list[torch.Tensor]:
    """The outputs of each row's tree; all rows level by level, and nodes are in the order of their levels."""
    grown: list[list[torch.Tensor]] = [[] for _ in rows]
    for level in range(1, 1 + max(max(depths(parents)) for *_, parents in rows)):
        active = [row for row, (*_, parents) in enumerate(rows) if level in depths(parents)]
        counts = [depths(rows[row][3]).count(level) for row in active]
        reach = [len(grown[row]) + count for row, count in zip(active, counts, strict=True)]
        packed = pack_nodes(
            [names[row] for row in active],
            torch.zeros(sum(counts), dtype=torch.int64),
            counts,
            [len(rows[row][0]) + end for row, end in zip(active, reach, strict=True)],
            [rows[row][3][:end] for row, end in zip(active, reach, strict=True)],
        )
        inputs = [rows[row][2][len(grown[row]) : end] for row, end in zip(active, reach, strict=True)]
        for row, outputs in zip(active, runner.run(packed, torch.cat(inputs)).split(counts), strict=True):
            grown[row].extend(outputs)
    return [torch.stack(outputs) for outputs in grown]
