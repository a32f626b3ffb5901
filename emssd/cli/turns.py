"""Engines that decode the same requests by turns, so that what slows the machine slows them all; and a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from math import sqrt
from statistics import pstdev
from typing import Any

import torch

from emssd.decoding.check import CheckReport, compare
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack_nodes
from emssd.decoding.warmup import warm_up
from emssd.model import CausalLMRunner
from emssd.sequences import Generation, Request, Row

__all__ = ["Done", "Turns", "check_metrics", "compared", "ratio_interval"]

_MOST_PARTS = 40
_FEWEST_PARTS = 10  # fewer are no sample

Done = Mapping[tuple[str, int], Generation]
"""Rows by the id of their prompt, and their sample."""

Speeds = Seq[tuple[int, float]]
"""Of each engine, the tokens and the seconds of its decode steps."""


class Turns:
    """Runs `engines` over `requests`; each engine decodes some tokens, then the next one decodes as many.

    Args:
        watch: gets the rows of the first engine, see `Engine.run`.

    Attributes:
        parts: what the engines did in each round of turns.
    """

    def __init__(
        self, engines: Seq[Engine], requests: Seq[Request], watch: Callable[[Row], None] | None = None
    ) -> None:
        self._engines, self._requests, self._watches = engines, requests, {engines[0]: watch}
        self.parts: list[Speeds] = []

    def run(self) -> Iterator[tuple[Engine, Generation]]:
        """Warm up, then yield what the engines finish, in finish order. Closing the iterator frees what runs."""
        for engine in self._engines:
            _record(engine, self._requests[: engine.batch_size])
            warm_up(engine, self._requests)
        share = max(sum(request.max_new_tokens for request in self._requests) // _MOST_PARTS, 1)
        with ExitStack() as stack:
            running = {}
            for engine in self._engines:
                steps = engine.steps(self._requests, watch=self._watches.get(engine))
                running[engine] = stack.enter_context(closing(steps))
            goal, before = 0, self._speeds()
            while running:
                goal += share
                for engine in [*running]:
                    while engine.report.num_new_tokens < goal:
                        if (finished := next(running[engine], None)) is None:
                            del running[engine]
                            break
                        yield from ((engine, generation) for generation in finished)
                now = self._speeds()
                self.parts.append([(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, now, strict=True)])
                before = now

    def _speeds(self) -> Speeds:
        sums = [engine.report.decode for engine in self._engines]
        return [(decode.num_new_tokens, decode.total_seconds) for decode in sums]


def ratio_interval(parts: Seq[Speeds]) -> tuple[float, float] | None:
    """Two standard errors around the first engine's tokens/s ÷ the second's; ``None`` if `parts` are too few.

    The standard error is that of the jackknife: how much the ratio changes as one part after another is left out.
    """
    whole = [part for part in parts if all(tokens and seconds for tokens, seconds in part)]
    if (number := len(whole)) < _FEWEST_PARTS:
        return None
    done = torch.tensor(whole, dtype=torch.float64)  # [parts, 2, 2]: tokens and seconds of both engines
    sums = done.sum(0) - torch.cat([torch.zeros_like(done[:1]), done])  # of all parts, then of all but one
    ours, plain = (sums[..., 0] / sums[..., 1]).unbind(-1)
    ratio, *without_one = (ours / plain).tolist()
    error = sqrt(number - 1) * pstdev(without_one)
    return ratio - 2 * error, ratio + 2 * error


def compared(engine: Engine, judge: CausalLMRunner, requests: Seq[Request], done: Done, expected: Done) -> CheckReport:
    """Compare rows that `engine` has `done` with those `expected` of plain decoding. The `judge` runs its target."""
    rows = {request.prompt_id: engine.row(request) for request in requests}
    same, drawn = list[tuple[str, int]](), list[tuple[str, int]]()
    for request in requests:
        has_law = request.sampling is not None and request.sampling.is_residual
        (drawn if has_law else same).append((request.prompt_id, request.sample))
    report = compare([done[key] for key in same], [expected[key] for key in same], judge, rows)
    return replace(report, law=engine.rule.check([done[key] for key in drawn], judge, rows) if drawn else None)


def check_metrics(report: CheckReport) -> dict[str, Any]:
    """The `report` as ``metrics.json`` has it."""
    details = [asdict(difference) for difference in report.differences]
    return {
        "exact": report.num_exact,
        "ties": len(report.ties),
        "differences": len(report.true_differences),
        "details": [{"id": detail.pop("request_id")} | detail for detail in details],
    } | ({} if report.law is None else {"law": report.law.metrics})


@torch.inference_mode()
def _record(engine: Engine, requests: Seq[Request]) -> None:
    """Run a step of chains of each size that the backend records, up to that of the longest drafts for all `requests`.

    The largest is the first, as the graphs of all have the memory of the largest.
    """
    runner, num_rows, greedy = engine.runner, len(requests), all(request.sampling is None for request in requests)
    if not isinstance(runner, CausalLMRunner):
        return
    runner.begin()
    most = num_rows * (1 + engine.drafting.num_speculative_tokens)
    for size in reversed([size for size in runner.backend.recorded_sizes if size <= most]):
        lengths = [len(range(row, size, num_rows)) for row in range(min(size, num_rows))]
        names = list(map(str, range(len(lengths))))
        if runner.fits(dict(zip(names, lengths, strict=True))):
            packed = pack_nodes(names, torch.zeros(size, dtype=torch.int64), lengths, lengths)
            runner.run(packed._replace(greedy=greedy))
            runner.release(names)
