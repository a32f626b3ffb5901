"""The host's part of a step: what Python does between two launches of a recorded forward pass, by batch size.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --nodes 16 --context 2048 --batch-sizes 8       # steps of token trees

Engine, scheduler, `pack`, `PlannedKernels` with recorded steps, `verify` and commit are the real ones. Only what
runs on a device is left out: attention computes nothing, and the forward pass returns logits that accept the first
`ACCEPTED` of the `DRAFTED` tokens of each row. So no GPU is needed. FlashInfer's own `plan`, the copies to the device
and the launches come on top.

Every row begins after a prompt of `CONTEXT` tokens. A run's figure is the median over its steps, in seconds of the
thread's own, so that other processes are not in it. The table shows the median of several runs, and for the sum the
smallest and the largest as well.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from common import make_parser, medians, save, show
from emssd_flashinfer.planned import PagedAttention, PlannedKernels
from emssd_flashinfer.recorded import StaticInputs
from emssd_flashinfer.tables import PagedMetadata, TreeMask

from emssd.attention import KVCacheSpec, LayerSpec, PackedInputs, PagedBackend
from emssd.decoding.engine import Engine
from emssd.decoding.outcome import StepTimer
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import Draft, Drafter
from emssd.metrics.stats import StepStats
from emssd.model import CausalLMRunner, ModelOutput
from emssd.sequences import Batch, Request
from tests.support.reference_kernels import rerun

DRAFTED, ACCEPTED, CONTEXT = 7, 3, 512
STEPS, WARM_UP = 150, 20
VOCABULARY = 8  # that argmax, which runs on the device, takes no time here
RIGHT, WRONG = 1, 2
COLUMNS = ("schedule", "pack", "plan", "commit", "verify", "statistics")
BETWEEN = COLUMNS[:4]  # what the targets are about
TARGETS = {8: 0.25, 64: 0.6}  # ms


class NoAttention:
    """A `PagedAttention` that does nothing."""

    def plan(self, metadata: PagedMetadata, mask: TreeMask | None = None) -> None:
        pass

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        pass


class NoKernels(PlannedKernels):
    """Plans for kernels that do nothing."""

    def attention(
        self, layer: LayerSpec, *, masked: bool = False, static: StaticInputs | None = None
    ) -> PagedAttention:
        return NoAttention()


class NoModel(CausalLMRunner):
    """Plans a step as it is, and has a forward pass that says `RIGHT` whatever it is fed."""

    def __init__(self, batch_size: int, drafted: int, context: int, trees: bool) -> None:
        self.vocab_size, self.max_model_len = VOCABULARY, context + 1536
        self.device, self.dtype = torch.device("cpu"), torch.float16
        most = batch_size * (1 + drafted)
        kernels = NoKernels((64, 128), capture=rerun, max_graph_tokens=2 * most)
        self.backend = PagedBackend(kernels, memory_fraction=1.0)
        layers = (LayerSpec(1, 1, 64, 64, 1.0),)
        spec = KVCacheSpec(layers, self.dtype, self.device, batch_size, self.max_model_len, trees=trees)
        self.backend.allocate(spec)
        self._logits = torch.zeros(most, VOCABULARY)
        self._logits[:, RIGHT] = 1
        self.seconds = {"plan": 0.0, "commit": 0.0}
        self.num_recorded = 0
        self.num_layers = self._states = None

    def begin(self) -> None:
        """There is no model that could have changed."""

    def run(self, packed: PackedInputs) -> ModelOutput:
        start = time.thread_time()
        plan = self.backend.plan(packed)
        self.seconds["plan"] = time.thread_time() - start
        if plan.replay is not None:
            plan.replay(lambda: self._logits)
            self.num_recorded += 1
        num_padding = plan.input_ids.numel() - packed.num_tokens
        return ModelOutput(self._logits[: len(packed.logit_rows)], num_padding, plan_seconds=self.seconds["plan"])


class FixedDrafter(Drafter):
    """Drafts the same tokens in every step. The first `ACCEPTED` of them are right."""

    num_speculative_tokens = DRAFTED

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chain = [RIGHT] * ACCEPTED + [WRONG] * (DRAFTED - ACCEPTED)
        return Draft.from_chains([chain[:limit] for limit in budget])


class TreeDrafter(Drafter):
    """Drafts the same tree in every step: a chain of right tokens, beside nodes that are wrong."""

    drafts_trees = True

    def __init__(self, num_nodes: int) -> None:
        self.num_speculative_tokens = num_nodes

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        others = range(self.num_speculative_tokens - ACCEPTED)
        tree = [(RIGHT, node - 1) for node in range(ACCEPTED)]
        tree += [(WRONG + 1 + node % 5, node % ACCEPTED - 1) for node in others]
        return Draft.from_trees([tree[:limit] for limit in budget])


class TimedEngine(Engine):
    """Times the commit, too: the backend's own, and every row's. Keeps the milliseconds of each column, by step."""

    runner: NoModel

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, make_timer=lambda: StepTimer(time.thread_time), **options)  # of this thread only
        self.found: list[dict[str, float]] = []

    def _advance(self, *step: Any) -> None:
        start = time.thread_time()
        super()._advance(*step)
        self.runner.seconds["commit"] = time.thread_time() - start

    def _count(self, stats: StepStats, timer: StepTimer) -> None:
        super()._count(stats, timer)
        own, seconds = self.runner.seconds, timer.seconds
        parts = (
            seconds["schedule"], seconds["plan"] - own["plan"], own["plan"], own["commit"], seconds["verify"],
            seconds["other"] - own["commit"],
        )  # fmt: skip
        self.found.append({name: 1000 * part for name, part in zip(COLUMNS, parts, strict=True)})


def steps(batch_size: int, context: int = CONTEXT, num_nodes: int = 0) -> list[dict[str, float]]:
    """Milliseconds of each column, by step, of one run; of trees of `num_nodes`, if that is given."""
    drafter: Drafter = TreeDrafter(num_nodes) if num_nodes else FixedDrafter()
    runner = NoModel(batch_size, drafter.num_speculative_tokens, context, bool(num_nodes))
    scheduler = ContinuousScheduler(batch_size, max_step_tokens=2 * context * batch_size)  # all prompts in one step
    engine = TimedEngine(runner, drafter, scheduler=scheduler)
    for row in range(batch_size):
        engine.add(Request(str(row), (RIGHT,) * context, 10**4))
    while engine.report.decode.num_steps < WARM_UP + STEPS:
        engine.step()
    assert engine.report.mean_acceptance_length >= ACCEPTED, "the drafts are not accepted as planned"
    assert runner.num_recorded >= STEPS, "the steps are not recorded"
    assert engine.report.decode.num_row_steps == engine.report.decode.num_steps * batch_size, "rows have ended"
    return engine.found[-STEPS:]


def run(batch_size: int, context: int, num_nodes: int) -> dict[str, float]:
    """Median milliseconds of each column over the steps of a run, and of what lies between two launches."""
    each = steps(batch_size, context, num_nodes)
    medians = {name: statistics.median(step[name] for step in each) for name in COLUMNS}
    between = statistics.median(sum(step[name] for name in BETWEEN) for step in each)
    return medians | {"between": between, "all": statistics.median(sum(step.values()) for step in each)}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--nodes", type=int, default=0, help="steps of trees of so many nodes, and not of chains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, lines = [], []
    for size in options.batch_sizes:
        turns = [run(size, options.context, options.nodes) for _ in range(options.repeats)]
        rows.append({"batch_size": size, "turns": turns})
        middle, between = medians(turns), [turn["between"] for turn in turns]
        target = f"{TARGETS[size]:.2f}" if size in TARGETS and not options.nodes else ""
        cells = (f"{middle[name]:.3f}" for name in (*COLUMNS, "between"))
        lines.append([size, *cells, f"{min(between):.3f}-{max(between):.3f}", target, f"{middle['all']:.3f}"])
    title = f"ms per step, {1 + (options.nodes or DRAFTED)} tokens a row after {options.context}, {platform.machine()}"
    show(title, ("batch", *COLUMNS, " + ".join(BETWEEN), "range", "target", "all"), lines)
    save(options.out, rows)


if __name__ == "__main__":
    main()
