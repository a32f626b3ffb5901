"""Limits of the KV cache: sizes and shares, requests that are larger, and what a step costs beside a count by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from emssd_lab.costs import Costs
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from emssd import Engine
from emssd.attention import pool
from emssd.attention.pool import free_bytes, kv_bytes
from emssd.decoding.caches import Caches, shares
from emssd.decoding.options import EngineOptions
from emssd.decoding.packing import pack_nodes
from emssd.errors import ConfigError, PluginError, PromptError
from emssd.hooks.registry import Registry
from emssd.model import TargetModel
from tests.support.tiers import looped

CPU = torch.device("cpu")
TOKEN_BYTES = 2 * 2 * 32 * 8  # layers, keys and values, hidden size, float64


@looped(
    ("given", "expected"),
    [
        (None, None),
        ("8GiB", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("2 TB", 2 * 10**12),
        (" 64MiB ", 64 * 2**20),
        ("1B", 1),
        ("4096", 4096),
        (4096, 4096),
        (1e9, 10**9),
        ("1e9", 10**9),
        ("2e3MB", 2 * 10**9),
    ],
)
def test_sizes(given: str | float | None, expected: int | None) -> None:
    assert kv_bytes(given, CPU) == expected


@pytest.mark.parametrize("given", ["0.8", 0.8, "1", 1, "1.0", ".25"])
def test_shares_are_of_what_is_free(given: str | float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "free_bytes", lambda device: 10_000)
    assert kv_bytes(given, CPU) == int(float(given) * 10_000)


NO_SIZES = [
    "", "much", "8G", "8gib", "80%", "-1", "-8GiB", "0.4B", "0.0001KiB", "1e400GiB", "１GiB", "0", "0.0", "0GiB", "GiB",
    ".", "1.2.3", "5iB", "8 GiB free", "nan", "inf", "1e999", True, 0, -1.0, float("-inf"), float("inf"), float("nan"),
]  # fmt: skip


@looped("given", NO_SIZES)
def test_anything_else_is_refused_with_what_is_possible(given: str | float) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory is .*8GiB or 500MB, or a share of the free memory such as 0\.8"):
        kv_bytes(given, CPU)


def test_memory_that_pytorch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(torch.device("cuda")) == 100 + 80 - 30


def test_a_request_that_cannot_fit_even_alone_is_refused_before_anything_runs() -> None:
    plain = RaggedConfig(kernels=Kernels.torch)  # whose pages hold narrow heads without padding
    engine = Engine.from_model(tiny_model(), drafter="none", backend=plain, kv_memory=str(48 * TOKEN_BYTES))
    with pytest.raises(
        PromptError, match=r"request 1 takes up to 49 tokens .*9 of them for its prompt.*raise kv_memory"
    ):
        engine.generate([[3], [4] * 9, [5]], [5, 40, 5])
    assert engine.report.num_steps == 0
    assert not engine.scheduler.has_work
    assert engine.runner.usage.held == 0
    assert len(engine.generate([[4] * 8], 40, ignore_eos=True)[0].token_ids) == 40
    assert engine.report.kv_usage.peak_pool <= 48 * TOKEN_BYTES


@given(
    limit=st.integers(0, 10**6),
    costs=st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 400)).map(lambda pair: (max(pair), min(pair))), min_size=1
    ),
    page_size=st.integers(1, 40),
)
def test_caches_that_share_a_limit_have_equally_many_pages_within_it(
    limit: int, costs: list[tuple[int, int]], page_size: int
) -> None:
    num_bytes = [most * counted for most, (_, counted) in zip(shares(limit, costs), costs, strict=True)]
    pages = {room // (held * page_size) for room, (held, _) in zip(num_bytes, costs, strict=True)}
    assert sum(num_bytes) <= limit
    assert len(pages) == 1
    assert limit - sum(num_bytes) < 2 * sum(held for held, _ in costs)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_the_caches_of_several_draft_models_share_the_limit_with_the_targets(kernels: str) -> None:
    """Drafters are built before the target's backend is, each with what it asks for."""
    target, options = TargetModel(tiny_model()), EngineOptions(kv_memory="1MB")
    others = [TargetModel(tiny_model("llama", head_dim=head_dim)).kv_cache_spec(8) for head_dim in (8, 10, 32)]
    caches = Caches(RaggedConfig(kernels=Kernels(kernels)), options, target.kv_cache_spec(8), Registry())
    specs = [*others, caches.target]
    made = [*map(caches.make, others), caches.make()]
    caches.allocate()
    pages = [next(n for n in itertools.count() if not backend.fits({"a": 16 * n + 1})) for backend in made]
    page_bytes = [16 * backend.bytes_per_token(spec) for backend, spec in zip(made, specs, strict=True)]
    assert len(set(pages)) == 1
    assert 10**6 - 2 * sum(page_bytes) < pages[0] * sum(page_bytes) <= 10**6
    for backend, num_bytes in zip(made, page_bytes, strict=True):
        backend.plan(pack_nodes(["a"], torch.tensor([3]), [1], [1]))
        assert backend.kv_usage.held == num_bytes


def test_a_backend_that_keeps_no_limit_says_so() -> None:
    with pytest.raises(ConfigError, match="kv_memory is 'lots'"):
        Engine.from_model(tiny_model(), kv_memory="lots")
    with pytest.raises(PluginError, match=r"'padded' cannot serve this model: .*keeps no memory limit"):
        Engine.from_model(tiny_model(), backend="padded", kv_memory="1GiB")


def test_free_memory_is_less_than_what_the_machine_has() -> None:
    import psutil

    assert 0 < free_bytes(CPU) < psutil.virtual_memory().total


COSTS = Costs(weight_bytes=1000, kv_bytes_per_token=8, matmul_parameters=500, attention_flops_per_kv_token=6)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 40))
def test_a_step_is_the_sum_over_its_tokens(rows: int, new: int, context: int) -> None:
    moved, flops = COSTS.of_step(rows, rows * new, rows * (context + new))
    assert moved == 1000 + 8 * rows * (context + new)
    seen = sum(context + new for _ in range(rows) for _ in range(new))
    assert flops == pytest.approx(rows * new * 2 * 500 + 6 * seen, rel=1e-12)


def test_weights_are_counted_once_and_tables_that_are_only_looked_up_are_not() -> None:
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48  # queries, keys, values, output; MLP
    matmul = 2 * layer + 61 * 32  # and the projection to the vocabulary
    costs = Costs.of(TargetModel(tiny_model("llama", dtype=torch.float32, tie_word_embeddings=False)))
    assert costs.matmul_parameters == matmul
    assert costs.weight_bytes == 4 * (matmul + 5 * 32)  # norms
    assert costs.kv_bytes_per_token == 2 * 2 * 16 * 4
    assert costs.attention_flops_per_kv_token == 2 * 4 * 2 * (8 + 8)
    tied = Costs.of(TargetModel(tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True)))
    assert tied == costs


def test_of_a_mixture_of_experts_a_token_takes_its_own() -> None:
    model = tiny_model("mixtral", dtype=torch.float32, num_local_experts=8, num_experts_per_tok=2)
    layer = 32 * (32 + 16 + 16 + 32) + 32 * 8 + 2 * 3 * 32 * 48  # attention, router, two of eight experts
    costs = Costs.of(TargetModel(model))
    assert costs.matmul_parameters == 2 * layer + 61 * 32
    assert costs.weight_bytes == 4 * (costs.matmul_parameters + 5 * 32)
