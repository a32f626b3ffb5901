"""Recorded passes that launch less: what is fused, that it keeps each bit, and what is refused."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from emssd_flashinfer.fused import Fusing, Group, fused
from emssd_flashinfer.kernel_source import FUNCTIONS, kernel_source
from emssd_flashinfer.traced import VIEWS, Op, Trace, UntraceableError, run
from emssd_flashinfer.triton_kernels import TritonKernels, inexact_functions
from emssd_heads import HeadRunner
from emssd_heads.config import DecoderConfig
from emssd_heads.head import LayerHead
from emssd_testing.drafters import RandomDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import Kept, KVCacheSpec, PagedBackend
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack_nodes
from emssd.errors import PluginError
from emssd.model import CausalLMRunner, TargetModel
from emssd.model.run.target import Computed
from tests.support.backends import runner_of as reference_runner
from tests.support.fused_kernels import Read, Twins, as_it_is
from tests.support.reference_kernels import ReferenceKernels, rerun

A: Any = torch.ops.aten
ALL_JOINED = 1 << 30


def model_of(architecture: str, num_layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Heads of 16, which are not padded."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64} if architecture == "opt" else {"head_dim": 16}
    return tiny_model(architecture, num_hidden_layers=num_layers, dtype=dtype, **sizes)


def runner_of(model: Any, fusing: Fusing | None, capture: Any = rerun) -> CausalLMRunner:
    kernels = ReferenceKernels((16, 64), capture=capture, max_graph_tokens=16, fusing=fusing)
    return reference_runner(TargetModel(model), PagedBackend(kernels, page_size=4, memory_fraction=1.0))


def history(model: Any, fusing: Fusing | None, num_tokens: int = 6) -> list[torch.Tensor]:
    """The logits of all steps of a run with drafts, which are accepted and rejected."""
    runner, found = runner_of(model, fusing), list[torch.Tensor]()
    compute = runner._compute

    def noted(*given: Any) -> Computed:
        out = compute(*given)
        found.append(out.logits.clone())
        return out

    runner._compute = noted  # type: ignore[method-assign]
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    engine.generate([[1, 5, 6], [9], [8, 2, 8], [4, 4]], num_tokens, ignore_eos=True)
    return found


class Noting(Fusing):
    """Keeps the operations of the last pass, as they were and with fewer launches."""

    def _fewer(self, plain: list[Op], *others: Any) -> list[Op]:
        self.plain, self.fewer = plain, super()._fewer(plain, *others)
        return self.fewer


def launches(architecture: str) -> tuple[Counter[str], Counter[str]]:
    """Per layer: before and after; views launch nothing."""
    counts = []
    for num_layers in (2, 3):
        kept = Noting(Twins(), ALL_JOINED)
        history(model_of(architecture, num_layers), kept, 1)
        counts.append([
            Counter(getattr(op.function, "__name__", "") for op in ops if op.function not in VIEWS)
            for ops in (kept.plain, kept.fewer)
        ])  # fmt: skip
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


@pytest.mark.parametrize(("architecture", "before", "after"), [("llama", 42, 13), ("qwen3", 58, 17), ("opt", 19, 11)])
def test_a_recorded_layer_launches_so_much(architecture: str, before: int, after: int) -> None:
    """Attention is one here; FlashInfer has another to merge what it splits."""
    plain, fewer = launches(architecture)
    assert (sum(plain.values()), sum(fewer.values())) == (before, after), (plain, fewer)


@pytest.mark.parametrize(("layers_worth", "products"), [(0, 7), (1, 6), (2, 5)])
def test_products_are_joined_as_far_as_memory_goes(layers_worth: int, products: int) -> None:
    """Queries, keys and values come first, as they save two launches with the least memory."""
    kept = Noting(Twins(), layers_worth * 2 * (64 + 2 * 32) * 32)
    history(model_of("llama"), kept, 1)
    assert sum(op.function is A.mm.default for op in kept.fewer) == products * 2 + 1, "of the vocabulary"


@pytest.mark.parametrize("architecture", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_logits_have_the_same_bits(architecture: str, dtype: torch.dtype) -> None:
    model, kernels = model_of(architecture, dtype=dtype), Read()
    with torch.backends.mkldnn.flags(enabled=False):  # with AVX512-FP16, a joined product of oneDNN's differs
        wanted, found = history(model, None), history(model, Fusing(kernels, ALL_JOINED))
    assert len(wanted) == len(found) > 4
    assert all(map(torch.equal, wanted, found))
    assert kernels.texts
    assert all("n1" in text for text in kernels.texts if "place // 16" in text and "p5" in text), "one launch, 2 shapes"


def test_a_text_is_for_any_number_of_tokens() -> None:
    kernels = Read()
    history(model_of("llama"), Fusing(kernels, ALL_JOINED))
    assert len(kernels.texts) > 2 * len(set(kernels.texts)), "layers and sizes share their kernels"


def test_a_pass_stays_as_long_as_its_recording_which_reads_its_joined_weights() -> None:
    """A CUDA graph holds addresses, and no tensor. The weights are forgotten when another pass cannot be fused."""
    passes = list[weakref.ref[Any]]()

    def graph_of(compute: Any) -> Any:
        passes.append(weakref.ref(compute))
        return rerun(weakref.proxy(compute))

    runner = runner_of(model_of("llama"), Fusing(Twins(), ALL_JOINED), graph_of)
    Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3).generate([[1, 5]], 3)
    assert passes
    assert all(each() is not None for each in passes)
    runner.backend.forget_steps()
    assert all(each() is None for each in passes)


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "silent": lambda x, y: torch.add(x, y, alpha=0),
    "double": lambda x, y: x * 2.0,
    "square": lambda x, y: x.pow(2),
    "neg": lambda x, y: -x,
    "relu": lambda x, y: x.relu(),
    "root": lambda x, y: (x.float().pow(2) + 1e-5).rsqrt(),
    "finite": lambda x, y: x.nan_to_num(0.0, 0.0, 0.0),
    "wide": lambda x, y: x.float(),
    "narrow": lambda x, y: x.to(y.dtype),
    "turn": lambda x, y: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1),
    "swap": lambda x, y: x.transpose(0, 1) + x.transpose(0, 1),
    "flat": lambda x, y: (x + x).reshape(1, -1, x.shape[-1]) * y[:1],
}


@settings(max_examples=40)
@given(data=st.data())
def test_a_kernel_does_what_its_operations_do(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    num_tokens, heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(heads, num_tokens, 8, generator=seed).to(dtype)
    if data.draw(st.booleans()):
        x = torch.randn(num_tokens, heads, 8, generator=seed).to(dtype).transpose(0, 1)
    if data.draw(st.booleans()):
        x[0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    pool = [x, torch.randn(1, num_tokens, 8, generator=seed).to(dtype), torch.randn(8, generator=seed).to(dtype)]
    pages, slots = torch.zeros(9, 3, 8, dtype=dtype), torch.randperm(9, generator=seed)
    trace = Trace()
    with torch.inference_mode(), trace:
        for name in data.draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=8)):
            one, other = (data.draw(st.sampled_from(pool)) for _ in range(2))
            try:
                pool.append(OPERATIONS[name](one if one.dim() == 3 else x, other))
            except RuntimeError:  # shapes that do not go together
                continue
        new = next((each for each in reversed(pool) if each.dtype == dtype and each.shape[1:] == (3, 8)), None)
        if new is not None and len(new) <= 9:
            trace.storing = True
            pages.index_copy_(0, slots[: len(new)], new)
    expected, stored = [each.clone() for each in pool[3:]], pages.clone()
    results = [trace.value(each) for each in pool[3:]]
    pages.zero_()
    with torch.inference_mode():
        ops = fused(trace.ops, results, Read())
        found = run(ops, results)
    assert torch.equal(pages.nan_to_num(7.0), stored.nan_to_num(7.0))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_kernel_rounds_after_each_of_its_operations() -> None:
    x = torch.linspace(1.0, 3.0, 97).bfloat16()
    trace = Trace()
    with torch.inference_mode(), trace:
        expected = (x * x + x) * x
    results = trace.value(expected)
    ops = fused(trace.ops, results, Read())
    assert len(ops) == 1
    assert torch.equal(run(ops, results), expected)
    assert not torch.equal(((x.float() * x + x) * x).bfloat16(), expected), "rounding once would do"


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_functions_whose_last_bit_differs_are_found(function: Any) -> None:
    class Other(Twins):
        def __call__(self, group: Group) -> Callable[..., None]:
            def near(*tensors: torch.Tensor) -> None:
                as_it_is(group, *tensors)
                if group.ops[0].function is function:
                    tensors[-1][0x3F80] *= 1.5  # of one, in bfloat16

            return near

    few = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "last": 1 << 16}
    assert inexact_functions(Twins(), **few) == frozenset()
    assert inexact_functions(Other(), **few) == {function}


class TestRefusals:
    def test_kernels_that_round_otherwise_are_not_used(self, caplog: pytest.LogCaptureFixture) -> None:
        class Careless(Read):
            def __call__(self, group: Group) -> Callable[..., None]:
                kernel = super().__call__(group)

                def careless(*tensors: torch.Tensor) -> None:
                    kernel(*tensors)
                    tensors[-1].mul_(1.01)

                return careless

        model = model_of("llama")
        with caplog.at_level(logging.WARNING):
            assert all(map(torch.equal, history(model, None), history(model, Fusing(Careless(), 0))))
        assert "round otherwise" in caplog.text

    def test_a_product_that_rounds_otherwise_stays_apart(self, caplog: pytest.LogCaptureFixture) -> None:
        class Other(Noting):
            def _joined_weight(self, weights: Any) -> torch.Tensor:
                return super()._joined_weight(weights) * 1.01

        model, other = model_of("llama"), Other(Twins(), ALL_JOINED)
        with caplog.at_level(logging.WARNING):
            assert all(map(torch.equal, history(model, None), history(model, other)))
        assert "stay apart" in caplog.text
        assert sum(op.function is A.mm.default for op in other.fewer) == 15, "seven in each layer, and the vocabulary"

    def test_kernels_that_cannot_be_made_are_not_used(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Twins):
            def __call__(self, group: Group) -> Callable[..., None]:
                raise RuntimeError("no compiler")

        model = model_of("llama")
        with caplog.at_level(logging.WARNING):
            assert all(map(torch.equal, history(model, None), history(model, Fusing(Broken(), 0))))
        assert "no compiler" in caplog.text

    @pytest.mark.parametrize("what", ["number", "empty"])
    def test_a_pass_that_its_trace_would_not_do_again_is_left(self, what: str) -> None:
        def compute() -> torch.Tensor:
            if what == "number":
                return torch.ones(2) * float(torch.ones(2).sum())
            return torch.empty(2).zero_()

        with Trace() as trace, pytest.raises(UntraceableError):
            compute()
        assert trace.ops is not None
        assert Fusing(Twins(), 0)(compute) is compute

    def test_what_writes_in_place_stays_in_its_order(self) -> None:
        source = torch.ones(3)

        def compute() -> torch.Tensor:
            doubled = source * 2 + 1
            source.add_(1)
            return doubled + source * 2 + 1

        for _ in range(3):
            source.fill_(1.0)
            wanted = compute()
            source.fill_(1.0)
            with Trace() as trace:
                out = compute()
            source.fill_(1.0)
            assert torch.equal(run(fused(trace.ops, trace.value(out), Read()), trace.value(out)), wanted)


def test_a_model_that_cannot_be_recorded_runs_without_a_graph() -> None:
    calls = []

    def refuse(compute: Any) -> Any:
        calls.append(compute)
        raise PluginError("backend 'flashinfer' cannot record this")

    model = model_of("llama")
    runner = runner_of(model, None, refuse)
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    with pytest.warns(RuntimeWarning, match="steps run without a graph"):
        done = engine.generate([[1, 5, 6], [9]], 6, ignore_eos=True)
    plain = Engine(runner_of(model, None), RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    wanted = plain.generate([[1, 5, 6], [9]], 6, ignore_eos=True)
    assert [each.token_ids for each in done] == [each.token_ids for each in wanted]
    assert len(calls) == 1


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "lfm2"])
def test_a_model_that_keeps_states_is_not_recorded(architecture: str) -> None:
    """A recording would read the states of the rows that it was made with."""
    model = tiny_model(architecture, dtype=torch.float64)
    prompts = [[1, 5, 6], [9], [8, 2, 8], [4, 4]]
    expected = [greedy_reference(model, prompt, 6) for prompt in prompts]
    runner = runner_of(model, Fusing(Twins(), 0))
    assert runner._states is not None
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    done = engine.generate(prompts, 6, ignore_eos=True)
    assert [list(each.token_ids) for each in done] == expected


def test_a_recorded_head_computes_what_it_is_fed() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    head = LayerHead(DecoderConfig.read(sizes, "here"), ()).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    spec = KVCacheSpec(head.specs, torch.float64, torch.device("cpu"), 3, 32)
    found = []
    for kernels in (ReferenceKernels((16,), capture=rerun), ReferenceKernels((16,))):
        backend = PagedBackend(kernels, page_size=4, memory_fraction=1.0)
        backend.allocate(spec)
        runner, seed = HeadRunner(head, backend), torch.Generator().manual_seed(1)
        with torch.inference_mode():
            for lengths in ([4, 5], [1, 2], [2, 1], [4, 5]):  # a recording is replayed, and another is padded
                kv_lens = [runner.held.get(name, 0) + length for name, length in zip("ab", lengths, strict=True)]
                packed = pack_nodes(["a", "b"], torch.zeros(sum(lengths), dtype=torch.int64), lengths, kv_lens)
                inputs = torch.randn(sum(lengths), 32, dtype=torch.float64, generator=seed)
                found.append(runner.run(packed, inputs).clone())
                runner.commit(Kept(("a", "b"), tuple(kv_lens)))
        assert (len(kernels._recordings) > 1) == (kernels._capture is not None)
    for recorded, eager in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(recorded, eager)


INTERPRETED = """import triton
import triton.language as tl

@triton.jit
def exp(x):
    return tl.exp(x)

@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)

@triton.jit
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with a PyTorch for CUDA")
def test_tritons_interpreter_reads_the_text_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses float16: it truncates bfloat16; GPUs round."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, cos = torch.randn(5, 4, 16).half(), torch.randn(5, 1, 16).half()
    pages, slots = torch.zeros(40, 4, 16).half(), torch.tensor([3, 9, 1, 0, 30])
    with torch.inference_mode(), Trace() as trace:
        turned = x * cos + OPERATIONS["turn"](x, x) * cos
        squares = turned.float().pow(2)
        trace.storing = True
        pages.index_copy_(0, slots, torch.add(turned, x, alpha=0))
    results, stored = [trace.value(turned), trace.value(squares)], pages.clone()
    pages.zero_()
    with torch.inference_mode():
        found = run(fused(trace.ops, results, TritonKernels(INTERPRETED)), results)
    assert torch.equal(found[0], turned)
    assert torch.equal(found[1], squares)
    assert torch.equal(pages, stored)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with a PyTorch for CUDA")
def test_tritons_compiler_takes_the_text_and_fuses_no_product_with_a_sum() -> None:
    """Targets a Hopper GPU, which need not be there. Only `exp` has instructions that flush subnormals to zero."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    class Compiled(TritonKernels):
        def __call__(self, group: Group) -> Callable[..., None]:
            super().__call__(group)
            text = kernel_source("fused", group.ops, group.inputs, group.outputs)
            kernel = self._compiled[text]
            types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
            pointers = {f"p{place}": types[value.dtype] for place, value in enumerate(group.inputs)}
            pointers |= {f"q{place}": types[value.dtype] for place, value in enumerate(group.outputs)}
            rest = {name: "i32" for name in kernel.arg_names if name.startswith("n")} | {"BLOCK": "constexpr"}
            made = triton.compile(
                ASTSource(kernel, pointers | rest, {"BLOCK": 1024}),
                target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False},
            )  # fmt: skip
            assert made.asm["cubin"]
            program = made.asm["ptx"]
            if "exp(" not in text:
                assert not [word for word in ("fma.rn.f32", ".ftz") if word in program]
            return partial(as_it_is, group)

    history(model_of("llama"), Fusing(Compiled(), ALL_JOINED), 1)
    for architecture in ("llama", "opt"):  # of one token
        runner = runner_of(model_of(architecture), Fusing(Compiled(), 0))
        Engine(runner, RandomDrafter(runner.vocab_size, 0), batch_size=1).generate([[5]], 1)
