"""Runs a history, and collects its differences from the oracle."""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from emssd.decoding.engine import Engine
from emssd.decoding.options import Admission, Batching, EngineOptions, OnDrafterError
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.errors import EmssdError
from emssd.sequences import Generation, Request, StopStrings

from .backends import BACKENDS, registry
from .changes import CHANGES
from .drafters import HurtfulDrafter
from .histories import History
from .judge import Account, Judge
from .policies import POLICIES
from .worlds import Planted, Watch, World, watched

_ERRORS: dict[str, Callable[[], BaseException]] = {
    "Planted": lambda: Planted("planted in the middle of a step"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("planted"),
    "SystemExit": lambda: SystemExit(0),
}
_MOST_RAISED = 20  # by one drafter that breaks the rules again and again
_IDS = ("{}", "request {}", "é/{}", "{}\n", " {}")


def run_history(world: World, history: History) -> Account:
    """Run `history` in `world`, and compare everything that comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if history.num_threads > 1:
            return _at_once(world, history)
        return _Run(world, history).account()


def _at_once(world: World, history: History) -> Account:
    """The history in several threads, while whoever loaded the model calls it.

    What is right is known beforehand, as the oracle runs the model, too.
    """
    model, ids = world.model, torch.tensor([world.prompts[0]])
    before, right = model.config._attn_implementation, world.oracle.logits(world.prompts[0])
    world, together = replace(world, spread=None), Account()
    runs = [_Run(world, replace(history, seed=history.seed + at)) for at in range(history.num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(runs)) as pool, torch.inference_mode():
            running = [pool.submit(history.account) for history in runs]
            while not all(run.done() for run in running):
                with suppress(EmssdError):  # it may be told to wait
                    logits = model(ids, use_cache=False).logits[0, -1]
                    if not torch.allclose(logits, right, atol=1e-6 * float(right.abs().max())):
                        together.differences = ["the model, called beside its engines, gives other logits"]
        for run in running:
            together.add(run.result())
        if model.config._attn_implementation != before:
            together.differences.append(f"the model keeps the attention {model.config._attn_implementation!r}")
    finally:
        sys.setswitchinterval(interval)
        model.config._attn_implementation = before
    return together


def safely(world: World, history: History) -> Account:
    """The result of a history; whatever it raises where nothing may be raised is a difference."""
    try:
        return run_history(world, history)
    except KeyboardInterrupt:
        if history.fault is None:
            raise  # it was not planted
        return Account(["it raised KeyboardInterrupt out of turn"])
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Account([f"it raised {error!r} at {place.filename}:{place.lineno}"])


class _Run:
    """One history on its way: its engine, the faults that are thrown into it, and its results."""

    def __init__(self, world: World, history: History) -> None:
        if history.drive == "generate":  # takes one set of ends for all
            first = history.asks[0]
            history = replace(history, asks=tuple(replace(ask, eos=first.eos, stop=first.stop) for ask in history.asks))
        self.world, self.history, self.result = world, history, Account()
        name = _IDS[0] if history.drive == "generate" else random.Random(history.seed).choice(_IDS)
        self.asks = {ask.name or name.format(at): ask for at, ask in enumerate(history.asks)}
        self.most_steps = 40 + 6 * sum(len(world.text_of(ask)) for ask in self.asks.values())
        self.thrown: list[BaseException] = []
        self.judge = Judge(world, self.asks, self.result)
        self.come_to: Counter[str] = Counter()
        self.watch = Watch(self._faults)
        self.drafters = [self._drafter(at) for at in range(history.num_drafters)]
        self.watch.between = self._between
        self.engine = self._engine()

    def account(self) -> Account:
        """Run it all, as often as is asked for."""
        for at in range(self.history.rounds):
            if at and self.history.change:
                CHANGES[self.history.change](self.world.model, random.Random(self.history.seed + at))
                self.world.oracle.forget()
            got: dict[str, tuple[list[int], str]] = {}
            ended = False
            try:
                for request_id, tokens, reason in getattr(self, f"_{self.history.drive}")():
                    if request_id in got:
                        self.judge.wrong(f"{request_id!r} came out twice")
                    if request_id not in self.asks:
                        self.judge.wrong(f"{request_id!r} came out, and nobody asked")
                    got[request_id] = (tokens, reason)
            except BaseException as error:
                if not self._may_raise(error):
                    raise
                ended = True
                if isinstance(error, EmssdError):
                    for done in getattr(error, "finished", ()):
                        got[done.request_id] = (list(done.token_ids), str(done.finish_reason.value))
            self.judge.texts(got, ended)
            self.result.num_preempted += self.engine.report.num_preempted
            self.result.num_adopted += self.engine.report.num_adopted_tokens
            with suppress(EmssdError):  # a drafter that fails when it is told to forget
                self.engine.clear()
            if held := self.engine.runner.usage.held:
                self.judge.wrong(f"{held} bytes of KV are held by nobody")
            if ended:
                break
        self.judge.logits(self.watch.steps)
        good = not self.history.sin and not self.history.fault
        if good and not self.result.num_ties and not self.world.twins and not self.world.foul:
            for drafter in self.drafters:
                self.result.differences += [f"the drafter {complaint}" for complaint in drafter.complaints[:1]]
        self.result.num_steps = max(drafter.num_steps for drafter in self.drafters)
        self.result.num_drafted = sum(drafter.num_drafted for drafter in self.drafters)
        self.result.num_moved = sum(drafter.num_moved for drafter in self.drafters)
        return self.result

    def _engine(self) -> Engine:
        history, target, room = self.history, self.world.target, self.history.room
        longest = max(len(self.world.text_of(ask)) for ask in history.asks)
        policy: Any = history.policy
        if policy in POLICIES:
            policy = POLICIES[policy](history.seed, self.watch.faults)
        while True:
            spec = target.kv_cache_spec(history.batch_size)
            states = spec.bytes_per_row * spec.max_batch_size
            self.memory = None if room is None else room * spec.bytes_per_token() + states
            options = EngineOptions(
                batch_size=history.batch_size,
                batching=Batching(history.batching),
                max_step_tokens=history.max_step_tokens,
                kv_memory=None if self.memory is None else str(self.memory),
                admission=Admission(history.admission),
                on_drafter_error=OnDrafterError(history.on_error),
                prefix_caching=history.sharing or bool(history.change),
            )
            made = Engine.assemble(
                target,
                self.world.speller.tokenizer if self.world.speller else None,
                drafter=self.drafters,
                backend=BACKENDS[history.backend],
                budget=policy,
                options=options,
                registry=registry(),
                eos=history.asks[0].eos,
            )
            if room is None or made.runner.fits({"longest": longest}):
                break
            room += 16
        if history.change:
            return made  # its first logits are another model's
        if history.headroom is not None and isinstance(made.scheduler, ContinuousScheduler):
            made.scheduler = ContinuousScheduler(
                history.batch_size,
                history.max_step_tokens,
                worst_case=history.admission == "worst_case",
                headroom=history.headroom,
            )
        return watched(made, self.watch)

    def _drafter(self, at: int) -> HurtfulDrafter:
        return HurtfulDrafter(
            self.history,
            lambda request_id: self.world.text_of(self.asks[request_id]),
            self.world.vocab_size,
            at=at,
            foul=self.world.foul,
            faults=self.watch.faults,
        )

    def _request(self, request_id: str) -> Request:
        ask = self.asks[request_id]
        stop = StopStrings(ask.stop, self.world.speller.tokenizer) if ask.stop and self.world.speller else None
        prompt = self.world.prompts[ask.prompt]
        return Request(request_id, prompt, ask.limit, frozenset(ask.eos), stop, sampling=ask.sampling)

    # Ways to drive it; each yields request id, tokens and reason of what is finished.

    def _step(self) -> Iterator[tuple[str, list[int], str]]:
        """Requests that come between steps; a step that fails is followed by the next one."""
        to_come = sorted(self.asks, key=lambda request_id: self.asks[request_id].arrives)
        for step in range(self.most_steps):
            while to_come and self.asks[to_come[0]].arrives <= step:
                self.engine.add(self._request(to_come.pop(0)))
            idle = not to_come and not self.engine.scheduler.has_work
            with self._going_on():  # one step more, idle, brings what a step finished that failed
                finished = self.engine.step()
                self._check_limits()
                for row in finished:
                    yield row.request_id, list(row.output_ids), str(row.finish_reason.value)  # type: ignore[union-attr]
            if idle:
                return
        self.judge.wrong(f"it had not ended after {self.most_steps} steps")

    def _check_limits(self) -> None:
        """Never more KV than the limit; no row is preempted whose worst case was admitted."""
        usage, preempted = self.engine.runner.usage, self.engine.report.num_preempted
        if self.memory is not None and max(usage.held, usage.peak_held, usage.peak_pool) > self.memory:
            self.judge.wrong(f"{usage} is more than {self.memory} bytes")
        if self.history.admission == "worst_case" and preempted:
            self.judge.wrong(f"{preempted} rows were preempted, and all had room for their worst case")

    def _run(self) -> Iterator[tuple[str, list[int], str]]:
        if self.history.close_after is not None:
            early = self.engine.run([self._request(request_id) for request_id in self.asks])
            with self._going_on(), suppress(StopIteration):
                for _ in range(self.history.close_after):
                    next(early)
            early.close()  # type: ignore[attr-defined]  # it is a generator
        yield from self._judged(self.engine.run([self._request(request_id) for request_id in self.asks]))

    def _generate(self) -> Iterator[tuple[str, list[int], str]]:
        asks = list(self.asks.values())
        prompts, limits = [self.world.prompts[ask.prompt] for ask in asks], [ask.limit for ask in asks]
        yield from self._judged(self.engine.generate(prompts, limits, stop=asks[0].stop))

    def _judged(self, generations: Iterable[Generation]) -> Iterator[tuple[str, list[int], str]]:
        for done in generations:
            self.judge.text_before_stop(done)
            yield done.request_id, list(done.token_ids), str(done.finish_reason.value)

    # Faults, and errors that they may lead to.

    def _faults(self, place: str) -> None:
        fault = self.history.fault
        self.come_to[place] += 1
        if self.come_to[place] > 2 * self.history.rounds * self.most_steps and place == "before plan":
            raise RuntimeError("it does not end")  # nobody else counts the steps of an iterator
        if fault is not None and fault.place == place and self.come_to[place] in fault.times:
            error = _ERRORS[fault.error]()
            self.thrown.append(error)
            raise error

    def _between(self) -> None:
        for drafter in self.drafters:
            late, drafter.late = drafter.late, lambda: None
            with suppress(TypeError, AttributeError):  # what it may only read refuses to be changed
                late()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Catch what a step raises, and step on, as a caller may."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            # A drafter may have changed its batch, and what the tokens were may be lost; or it fails for ever.
            sin, expected = self.history.sin, self._may_raise(error)
            if not expected or (sin and ("token" in sin or self.result.num_raised > _MOST_RAISED)):
                raise

    def _may_raise(self, error: BaseException) -> bool:
        """Whether a step may raise `error`: it was planted, or a drafter that broke the rules is named."""
        self.result.num_raised += 1
        link: BaseException | None = error
        for _ in range(20):  # a drafter may raise the same error again, and so make a circle of them
            if any(planted is link for planted in self.thrown):
                return True
            link = link and (link.__cause__ or link.__context__)
        if self.history.sin and isinstance(error, EmssdError):
            return True
        self.judge.wrong(f"it raised {error!r}")
        return isinstance(error, Exception | SystemExit)
