"""Recorded passes that are compiled: any size, the check, what is refused; and what is not recorded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from emssd_testing.drafters import RandomDrafter
from emssd_testing.models import tiny_model

from emssd.attention import PagedBackend
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack_nodes
from emssd.model import CausalLMRunner, TargetModel
from emssd.model.compile.inductor import Compile, CompiledPasses, compiled
from emssd.model.compile.linears import join_products, lay_together
from emssd.model.compile.tracing import export
from emssd.model.run.target import Computed
from tests.support.backends import runner_of as reference_runner
from tests.support.reference_kernels import ReferenceKernels, rerun

ARCHITECTURES = ["llama", "qwen3", "gemma2", "opt", "gpt2"]
PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.addmm.default)
PROMPTS = [[1, 5, 6], [9], [8, 2, 8], [4, 4]]


def traced(module: Any, inputs: Any) -> Any:
    """A `Compile` without a compiler: the traced operations, one after another."""
    join_products(program := export(module, inputs).module())
    return program


def model_of(architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Heads of 16 elements, which are not padded."""
    width = {"opt": {"hidden_size": 64, "word_embed_proj_dim": 64}, "gpt2": {"n_embd": 64}}
    return tiny_model(architecture, dtype=dtype, **width.get(architecture, {"head_dim": 16}), **options)


def runner_of(
    model: Any,
    compile: Compile | None,
    capture: Any = rerun,
    head_dims: Any = (16, 64),
    *,
    frozen: bool = False,
    most: int = 16,
) -> CausalLMRunner:
    passes = None if compile is None else CompiledPasses(compile)
    kernels = ReferenceKernels(head_dims, capture=capture, max_graph_tokens=most, passes=passes)
    backend = PagedBackend(kernels, page_size=4, memory_fraction=1.0)
    return reference_runner(TargetModel(model, frozen=frozen), backend, trees=True)


def outcomes(runner: Any) -> list[bool]:
    """Whether each program of the runner has failed."""
    return [forward.has_failed for forward in runner.backend._kernels._compiled._forwards.values()]


def history(runner: Any, num_tokens: int = 2) -> list[torch.Tensor]:
    """The logits of all steps of a run with drafts, which are accepted and rejected."""
    compute, logits = runner._compute, list[torch.Tensor]()

    def noted(*args: Any) -> Computed:
        out = compute(*args)
        logits.append(out.logits.clone())
        return out

    runner._compute = noted  # type: ignore[method-assign]
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    engine.generate(PROMPTS, num_tokens, ignore_eos=True)
    return logits


@pytest.mark.parametrize("head_dims", [(16, 64), (64,)], ids=["heads as they are", "padded heads"])
def test_one_trace_serves_steps_of_all_sizes_with_the_bits_of_the_model(head_dims: tuple[int, ...]) -> None:
    model, sizes = model_of(), list[int]()

    def noted(module: Any, inputs: Any) -> Any:
        program = traced(module, inputs)
        return lambda *args: (sizes.append(args[0].numel()), program(*args))[1]

    expected = history(runner_of(model, None, head_dims=head_dims), 6)
    runner = runner_of(model, noted, head_dims=head_dims)
    assert all(map(torch.equal, expected, history(runner, 6)))
    assert {1, 2, 3, 12} <= {*sizes}
    assert outcomes(runner) == [False]


def run_sizes(runner: CausalLMRunner, sizes: Iterable[int]) -> None:
    """Run a step of each of these numbers of tokens."""
    runner.begin()
    for size in sizes:
        lengths = [len(range(row, size, 3)) for row in range(min(size, 3))]
        with torch.inference_mode():
            runner.run(pack_nodes("abc"[: len(lengths)], torch.arange(size) % 9, lengths, lengths))
        runner.release("abc")


@pytest.mark.parametrize(
    ("architecture", "num_layers", "most"),
    [("llama", 1, 8), *(pytest.param(name, 48, 128, marks=pytest.mark.nightly) for name in ARCHITECTURES)],
)
def test_there_is_a_graph_for_one_token_and_one_for_all_other_sizes(
    architecture: str, num_layers: int, most: int
) -> None:
    graphs = list[Any]()

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    lay_together(model := model_of(architecture, num_hidden_layers=num_layers))
    runner = runner_of(model, partial(compiled, backend=kept), most=most)
    run_sizes(runner, runner.backend.recorded_sizes)
    assert outcomes(runner) == [False]
    assert len(graphs) == 2, "one for one token, and one for all other numbers"
    assert [[node.target for node in graph.graph.nodes].count(torch.ops.emssd.attend.default) for graph in graphs] == [
        num_layers
    ] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_inductor_takes_the_trace_whole(architecture: str, dtype: torch.dtype) -> None:
    model = model_of(architecture, dtype)
    wanted = history(runner_of(model, None), 6)
    lay_together(model)
    runner = runner_of(model, compiled)
    for expected, logits in zip(wanted, history(runner, 6), strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)
    assert outcomes(runner) == [False]


@pytest.mark.parametrize(("architecture", "num_products"), [("llama", 4), ("qwen3", 4), ("opt", 4), ("gpt2", 4)])
def test_weights_side_by_side_are_one_product_and_one_memory(architecture: str, num_products: int) -> None:
    programs = list[Any]()

    def noted(module: Any, inputs: Any) -> Any:
        programs.append(traced(module, inputs))
        return programs[-1]

    def memory(model: Any) -> int:
        return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())

    model = model_of(architecture, torch.float64)
    expected, num_bytes = history(runner_of(model, None)), memory(model)
    lay_together(model)
    assert memory(model) == num_bytes, "no second copy"
    torch.testing.assert_close(history(runner_of(model, noted)), expected, rtol=0, atol=1e-12)
    products = [node for node in programs[0].graph.nodes if node.target in PRODUCTS]
    assert len(products) == num_products * model.config.num_hidden_layers + 1, "and the vocabulary"


class Counted(BaseException):
    """Inductor has fused, and what it would compile need not be compiled."""


def num_kernels(architecture: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The fused kernels of a pass, as Inductor's scheduler leaves them; concatenations are fused as on a GPU."""
    from torch._inductor import config, ir, lowering, scheduler

    found = list[int]()
    apart = scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode

    def count(nodes: list[Any]) -> list[Any]:
        found.append(sum(not isinstance(node, apart) for node in nodes))
        raise Counted

    monkeypatch.setattr(ir.ConcatKernel, "create", lambda inputs, dim: lowering.pointwise_cat(inputs, dim))
    lay_together(model := model_of(architecture, num_hidden_layers=num_layers))
    with config.patch(_post_fusion_custom_pass=count), pytest.raises(Counted):
        run_sizes(runner_of(model, compiled), [7])  # for one token, Inductor has products of its own on a CPU
    return found[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("architecture", "most"), [("llama", 5), ("qwen3", 5), ("opt", 5)])
def test_a_layer_is_few_kernels_beside_products_attention_and_store(
    architecture: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    three, two = (num_kernels(architecture, number, monkeypatch) for number in (3, 2))
    assert three - two <= most


def test_hidden_states_are_those_of_the_model() -> None:
    model, states = model_of(), list[torch.Tensor]()
    for compile in (None, traced):
        runner = runner_of(model, compile)
        runner.take_hidden([1, -1])
        packed = pack_nodes("ab", torch.tensor([3, 1, 4, 1]), [3, 1], [3, 1])
        with torch.inference_mode():
            states.extend(value.clone() for value in runner.run(packed).hidden.values())
    assert torch.equal(torch.stack(states[:2]), torch.stack(states[2:]))


class TestRefusals:
    @staticmethod
    def off_by(share: float) -> Compile:
        """A program whose logits are off by a share of the largest."""

        def compile(module: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                logits, *states = module(*args)
                return logits + share * logits.abs().max(), *states

            return run

        return compile

    @staticmethod
    def failing(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    @pytest.mark.parametrize(
        ("compile", "why"),
        [
            (off_by(0.3), r"a step of 1\d tokens on: it differs by 3\d\.\d roundings, and 8 may be"),
            (off_by(float("nan")), "differs by inf roundings"),
            (failing, "no compiler"),
        ],
        ids=["differs", "NaN", "fails"],
    )
    def test_a_program_that_fails_is_not_recorded(self, compile: Compile, why: str) -> None:
        model, captured = model_of(), list[int]()

        def capture(compute: Any) -> Any:
            captured.append(1)
            return rerun(compute)

        runner = runner_of(model, compile, capture)
        with pytest.warns(
            RuntimeWarning, match=rf"Llama.*without Inductor.*{why}.*backend\.fused_kernels=false"
        ) as warned:
            logits = history(runner)
        assert all(map(torch.equal, history(runner_of(model, None)), logits))
        assert len(warned) == 1
        assert captured, "it is recorded as it is"

    def test_a_difference_of_roundings_is_taken(self) -> None:
        model = model_of()
        runner = runner_of(model, self.off_by(0.03))
        assert not all(map(torch.equal, history(runner_of(model, None)), history(runner)))

    def test_arithmetic_of_our_own_is_not_compiled(self) -> None:
        target: Any = TargetModel(model_of())
        target.arithmetic = object()
        assert CompiledPasses(self.failing)(target, ()) == target.run


@pytest.mark.parametrize("change", ["values", "tensor", "hook"])
def test_a_program_goes_with_the_tensors_that_it_reads_and_follows_their_values(change: str) -> None:
    model, compiled_times = model_of(), list[int]()

    def noted(module: Any, inputs: Any) -> Any:
        compiled_times.append(1)
        return traced(module, inputs)

    lay_together(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    history(runner := runner_of(model, noted))
    with torch.no_grad():
        if change == "values":
            weight.mul_(2.0)
        elif change == "tensor":
            model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(weight * 2.0)
        else:
            model.lm_head.register_forward_hook(lambda module, args, out: out * 2.0)
    assert all(map(torch.equal, history(runner_of(model, None)), history(runner)))
    assert len(compiled_times) == (1 if change == "values" else 2)
    assert outcomes(runner) == [False]
