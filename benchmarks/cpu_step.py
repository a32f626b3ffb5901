"""A greedy decoding step on a CPU against its floor, beside Hugging Face's.

    python benchmarks/cpu_step.py --shape qwen2-0.5b --dtype float32 --engines compiled int8 --out step.json

The model has random weights, so that nothing need be downloaded; the time of a step does not depend on them. The floor
is the larger of two times: all weights and the KV read once at the bandwidth that a sum over a large tensor reaches,
and the step's arithmetic at the rate that a large matrix product reaches, both measured beside each batch size. It
counts the weights of the model as they are, also for ``int8``, which could be up to four times faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from common import best_ms, in_large_pages, make_parser, save, show
from rich.console import Console
from rich.progress import track

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import ModelOptions, TargetModel
from emssd.model.compile.packed import round_weights
from emssd.sequences import Request

ENGINES = {
    "compiled": "emssd, model.compile",
    "int8": "emssd, model.compile, model.weights=int8",
    "plain": "emssd",
    "hf": "Hugging Face generate",
}


def opt(layers: int, width: int, heads: int) -> Any:
    return transformers.OPTConfig(
        vocab_size=50272, max_position_embeddings=2048, num_hidden_layers=layers, num_attention_heads=heads,
        hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
    )  # fmt: skip


def qwen2(vocab_size: int) -> Any:
    return transformers.Qwen2Config(
        vocab_size=vocab_size, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, max_position_embeddings=16384, tie_word_embeddings=True,
    )  # fmt: skip


def llama(layers: int, width: int, heads: int, kv_heads: int, inner: int, vocab_size: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=16384, tie_word_embeddings=True,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "opt-125m": lambda: opt(12, 768, 12),
    "opt-1.3b": lambda: opt(24, 2048, 32),
    "qwen2-0.5b": lambda: qwen2(151936),
    "qwen2-0.5b, vocabulary of 32k": lambda: qwen2(32000),
    "llama-1b": lambda: llama(16, 2048, 32, 8, 8192, 128256),
    "llama-16m": lambda: llama(8, 384, 6, 6, 1024, 6144),
}


def random_model(shape: str, dtype: torch.dtype) -> Any:
    """A model of `shape` with random weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype).eval()


def machine_rates() -> tuple[float, float]:
    """Bytes per second of reading memory, and FLOPs per second of a matrix product, in the quicker of two types."""
    large = in_large_pages(1 << 27)
    bandwidth = large.numel() * 4 / best_ms(large.sum, 10) * 1e3
    dtypes = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # elsewhere a product takes seconds
        dtypes.append(torch.bfloat16)
    rates = []
    for dtype in dtypes:
        a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        rates.append(2 * 1024**3 / best_ms(partial(torch.mm, a, b), 20) * 1e3)
    return bandwidth, max(rates)


def step_seconds(engine: Engine, prompts: list[list[int]], num_new: int) -> list[float]:
    """Seconds of each step in which all rows decode."""
    seconds = []
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), num_new, frozenset()))
    while engine.scheduler.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[num_new // 4 : -2]


def bytes_read(model: Any) -> int:
    """The weight bytes that a step reads: all but lookup tables."""
    tables = {item.weight for item in model.modules() if isinstance(item, torch.nn.Embedding)}
    tables -= {item.weight for item in model.modules() if isinstance(item, torch.nn.Linear)}
    return sum(item.numel() * item.element_size() for item in model.parameters() if item not in tables)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Interleaved repeats of all ways to decode; milliseconds of a step."""
    dtype, context, num_new = getattr(torch, options.dtype), options.context, options.new
    model = random_model(options.shape, dtype)
    targets = {}
    if "compiled" in options.engines:
        targets["compiled"] = TargetModel(model, ModelOptions(compile=True))
    if "plain" in options.engines:
        targets["plain"] = TargetModel(model)
    if "int8" in options.engines:
        other = random_model(options.shape, dtype)
        round_weights(other)
        targets["int8"] = TargetModel(other, ModelOptions(compile=True))
    for name in targets.keys() & {"compiled", "int8"}:
        if targets[name].compiled is None:
            raise SystemExit("the model could not be compiled; see the warning above")
    weights, rows = bytes_read(model), []
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    for batch_size in options.batch_sizes:
        prompts = torch.randint(4, model.config.vocab_size, (batch_size, context)).tolist()
        chosen = EngineOptions(batch_size=batch_size, prefix_caching=False)
        engines = {
            name: Engine.assemble(target, None, drafter="none", backend="ragged", options=chosen)
            for name, target in targets.items()
        }
        times: dict[str, list[float]] = {name: [] for name in options.engines}
        rates = [machine_rates()]
        ids = torch.tensor(prompts)
        for repeat in track(range(options.repeats + 1), f"batch {batch_size}", console=console):
            for name, engine in engines.items():
                found = statistics.median(step_seconds(engine, prompts, num_new))
                if repeat:  # the first one warms up
                    times[name].append(found * 1e3)
            if "hf" in options.engines:
                lengths = []
                for length in (num_new // 4, num_new):
                    start = time.perf_counter()
                    model.generate(ids, do_sample=False, max_new_tokens=length, min_new_tokens=length, pad_token_id=1)
                    lengths.append(time.perf_counter() - start)
                if repeat:
                    times["hf"].append((lengths[1] - lengths[0]) / (num_new - num_new // 4) * 1e3)
        rates.append(machine_rates())
        bandwidth, rate = (max(item) for item in zip(*rates, strict=True))
        spec = next(iter(targets.values())).kv_cache_spec(batch_size)
        kv = batch_size * (context + num_new // 2) * spec.bytes_per_token()
        floor = max((weights + kv) / bandwidth, 2 * linear * batch_size / rate) * 1e3
        for name, found in times.items():
            middle = statistics.median(found)
            rows.append(
                {"batch_size": batch_size, "engine": ENGINES[name], "step_ms": middle, "all_ms": found,
                 "floor_ms": floor, "times_floor": middle / floor, "bandwidth_gb_s": bandwidth / 1e9,
                 "matmul_tflop_s": rate / 1e12}
            )  # fmt: skip
    return {"shape": options.shape, "dtype": options.dtype, "context": context, "rows": rows}


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--shape", choices=list(SHAPES), default="opt-125m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--engines", choices=list(ENGINES), nargs="+", default=["compiled", "plain", "hf"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--new", type=int, default=48, help="tokens generated")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    result = measure(options, Console())
    figures = ("step_ms", "floor_ms", "times_floor")
    show(
        f"greedy step, {options.shape}, {options.dtype}",
        ("batch", "engine", "ms per step", "floor", "× floor"),
        [[row["batch_size"], row["engine"], *(f"{row[name]:.2f}" for name in figures)] for row in result["rows"]],
    )
    save(options.out, result, dtype=dtype)


if __name__ == "__main__":
    main()
