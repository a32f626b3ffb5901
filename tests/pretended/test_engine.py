"""All drafters on the pretended device: tokens, waits of the host, and what a CUDA graph cannot record."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_flashinfer import FlashInferConfig
from emssd_flashinfer.planned import PlannedKernels
from emssd_flashinfer.recorded import CudaGraphCapture
from emssd_padded import PaddedConfig
from emssd_testing import tiny_model
from emssd_testing.drafters import RandomDrafter

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.draft_models import level_drafter, slot_drafter
from emssd.draft_models.top_tokens import on_host
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.model.compile.linears import lay_together
from emssd.sampling import SamplingParams
from emssd.sequences import Row
from tests.pretended.conftest import pytestmark as pytestmark
from tests.support.looking_back import looking_back_model, write_looking_back_block
from tests.support.perfect_head import perfect_target, write_perfect_eagle, write_perfect_eagle3, write_perfect_mtp
from tests.support.perfect_hydra import write_perfect_hydra
from tests.support.perfect_medusa import lagging_target, write_perfect_medusa
from tests.support.pretended import PretendedCuda

BACKENDS = {
    "eager": FlashInferConfig(cuda_graphs=False),
    "recorded": FlashInferConfig(fused_kernels=False),
    "compiled": FlashInferConfig(),
}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
NEW = 8
IN_ONE_GRAPH = ("draft_model", "early_exit", "eagle_chain", "eagle3_chain", "mtp")
"""Drafters whose loop over the tokens of greedy chains is one graph."""

RECORDED_TWICE = (*IN_ONE_GRAPH, "eagle", "eagle3", "dflash")
"""Drafters whose own passes are recorded beside the target's."""

ONCE_A_RUN = ("model/run/borrowed.py", "model/compile/inductor.py")
"""Where the host looks at the model's tensors, and at what a recording gives; paths end as they are noted."""


class Case(NamedTuple):
    """A model and how it is drafted for."""

    model: Callable[[], Any]
    drafter: str
    options: Callable[[Path], dict[str, Any]] = lambda folder: {}


def llama() -> Any:
    return tiny_model("llama")


def head(write: Callable[..., Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"path": str(write(folder)), **options}


CASES = {
    **{
        name: Case(llama, name)
        for name in ("none", "llma", "pld", "suffix", "lookahead", "token_recycling", "early_exit", "draft_model")
    },
    "eagle": Case(perfect_target, "eagle", head(write_perfect_eagle)),
    "eagle3": Case(perfect_target, "eagle3", head(write_perfect_eagle3)),
    "eagle_chain": Case(perfect_target, "eagle", head(write_perfect_eagle, tree="chain")),
    "eagle3_chain": Case(perfect_target, "eagle3", head(write_perfect_eagle3, tree="chain")),
    "mtp": Case(perfect_target, "mtp", head(write_perfect_mtp)),
    "medusa": Case(lagging_target, "medusa", head(write_perfect_medusa)),
    "hydra": Case(perfect_target, "hydra", head(write_perfect_hydra)),
    "dflash": Case(looking_back_model, "dflash", head(write_looking_back_block)),
}


def prompts_of(model: Any) -> list[list[int]]:
    size = model.config.get_text_config().vocab_size
    return [[token % size for token in prompt] for prompt in ([1, 5, 6, 5, 6, 5], [1], [1, 4, 4, 4, 4, 3], [2, 3])]


@cache
def expected(case: str, sampling: SamplingParams | None) -> list[tuple[int, ...]]:
    """On the CPU, without a draft."""
    model = CASES[case].model()
    engine = Engine.from_model(model, drafter="none", backend="ragged", batch_size=3)
    done = engine.generate(prompts_of(model), NEW, ignore_eos=True, sampling=sampling)
    return [row.token_ids for row in done]


@cache
def accepted_on_cpu(name: str) -> int:
    """The number of accepted tokens on the CPU."""
    model = CASES[name].model()
    with TemporaryDirectory() as folder:
        drafter = config_of(name, Path(folder))
        engine = Engine.from_model(model, drafter=drafter, backend="ragged", batch_size=3, budget="fixed")
    engine.generate(prompts_of(model), NEW, ignore_eos=True)
    return engine.report.num_accepted


def config_of(name: str, folder: Path) -> Any:
    return Registry().find("drafter", CASES[name].drafter).config(**CASES[name].options(folder / "head"))


@pytest.mark.parametrize(
    ("name", "sampling", "backend"),
    [
        *itertools.product(CASES, [None, SAMPLED], ["eager", "recorded"]),
        *itertools.product(["suffix", "draft_model", "eagle3"], [None], ["compiled"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value else "greedy",
)
def test_tokens_are_those_of_the_cpu_and_the_host_waits_once_a_step_and_once_a_level(
    name: str, sampling: SamplingParams | None, backend: str, request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    case, wanted = CASES[name], expected(name, sampling)
    device: PretendedCuda = request.getfixturevalue("device")
    if name != "draft_model":
        drafter = config_of(name, tmp_path)
    model = case.model().to("cuda")
    if backend == "compiled":
        lay_together(model)
    if name == "draft_model":
        twin = TargetModel(tiny_model("llama", seed=1).to("cuda"))
        runner = CausalLMRunner(twin, make_backend(twin.kv_cache_spec(3), BACKENDS[backend], Registry()))
        drafter = DraftModelDrafter(runner, twin.vocab_size, 4)
    engine = Engine.from_model(
        model, drafter=drafter, backend=BACKENDS[backend], batch_size=3, on_drafter_error="fail", budget="fixed"
    )
    waited, most_waited = list[int](), list[int]()  # for the likeliest tokens after the nodes of a level, or of a chain
    step = engine.step
    for module in (level_drafter, slot_drafter):
        monkeypatch.setattr(module, "on_host", lambda *args: (waited.append(1), on_host(*args))[1])

    def counted_step() -> list[Row]:
        device.waits.clear()
        waited.clear()
        finished = step()
        waits = [wait for wait in device.waits if not any(name in wait.where for name in ONCE_A_RUN)]
        assert len(waits) == 1 + len(waited), waits
        most_waited.append(len(waited))
        return finished

    planned, plan_chain = list[int](), PlannedKernels.plan_chain
    monkeypatch.setattr(
        PlannedKernels, "plan_chain", lambda *args: (plans := plan_chain(*args), planned.append(len(plans)))[0]
    )
    captures = set[int]()
    capture = CudaGraphCapture.__call__
    monkeypatch.setattr(
        CudaGraphCapture, "__call__", lambda self, compute: (captures.add(id(self)), capture(self, compute))[1]
    )
    monkeypatch.setattr(engine, "step", counted_step)
    done = engine.generate(prompts_of(model), NEW, ignore_eos=True, sampling=sampling)
    assert [row.token_ids for row in done] == wanted
    assert not device.illegal, device.illegal
    assert backend == "eager" or len(captures) == 1 + (name in RECORDED_TWICE)
    in_one_graph = backend != "eager" and sampling is None and name in IN_ONE_GRAPH
    assert in_one_graph == (max(planned, default=0) > 1), "passes that are one graph"
    assert not in_one_graph or max(most_waited) <= 1, "the host waits once for a chain"
    if sampling is None and name != "draft_model":
        assert engine.report.num_accepted == accepted_on_cpu(name)
    assert engine.report.num_drafted or name in ("none", "llma", "pld"), "nothing to copy in these texts"


def test_greedy_and_sampled_steps_of_a_size_are_recorded_apart(request: pytest.FixtureRequest) -> None:
    wanted = [expected("suffix", sampling) for sampling in (SAMPLED, None)]
    device: PretendedCuda = request.getfixturevalue("device")
    model = llama().to("cuda")
    engine = Engine.from_model(model, drafter="suffix", backend=BACKENDS["recorded"], batch_size=3, frozen=True)
    for sampling, tokens in zip((SAMPLED, None), wanted, strict=True):
        done = engine.generate(prompts_of(model), NEW, ignore_eos=True, sampling=sampling)
        assert [row.token_ids for row in done] == tokens
    assert not device.illegal, device.illegal


@pytest.mark.parametrize("backend", ["ragged", PaddedConfig(), PaddedConfig(pad_kv=False)], ids=str)
def test_other_backends_decode_the_tokens_of_the_cpu(backend: Any, request: pytest.FixtureRequest) -> None:
    wanted = expected("suffix", None)
    device: PretendedCuda = request.getfixturevalue("device")
    model = llama().to("cuda")
    engine = Engine.from_model(model, drafter="suffix", backend=backend, batch_size=3, budget="fixed")
    done = engine.generate(prompts_of(model), NEW, ignore_eos=True)
    assert [row.token_ids for row in done] == wanted
    assert device.waits


def test_two_engines_share_a_cache_one_after_the_other(request: pytest.FixtureRequest) -> None:
    wanted = expected("none", None)
    request.getfixturevalue("device")
    target = TargetModel(llama().to("cuda"))
    backend = make_backend(target.kv_cache_spec(3), BACKENDS["recorded"], Registry())
    for _ in range(2):
        engine = Engine(CausalLMRunner(target, backend), RandomDrafter(target.vocab_size, 0), batch_size=3)
        done = engine.generate(prompts_of(target.model), NEW, ignore_eos=True)
        assert [row.token_ids for row in done] == wanted
