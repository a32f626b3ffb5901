"""`CompilableModel`: a hooked model that runs as a compiled program where there is one, or where one pays.

`Compiling` tells how much of a program is compiled, and how long the rest takes.
"""

from __future__ import annotations

import logging
import timeit
import warnings
from collections.abc import Sequence as Seq
from datetime import timedelta
from time import monotonic, process_time
from typing import TYPE_CHECKING, Self

import torch

from emssd.data.model_options import ModelOptions
from emssd.errors import CompileError
from emssd.model.hf.find_streams import find_streams
from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.streams import Streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.compile.compiled import CompiledForward

__all__ = ["CompilableModel", "Compiling"]

# Seconds of a processor that compilers take, at least and for each of tracing; see docs/decisions/0012-compiled-code.md
_FIXED, _PER_TRACED = 13.0, 5.7
_TRACING = 0.3  # seconds for each layer, as long as none is traced
_PAYS = 4  # times as long as compiling: a program saves about half of that, and rows may end before their limit


class CompilableModel(HookedModel):
    """A hooked model and its program, which is taken or made when it is first asked for.

    Attributes:
        may_compile: whether a program that is wanted is compiled if none is kept.
        why_compiled: in a line, whether it is compiled, and why.
        num_renewals: how often the arithmetic or the weights became others; what was computed before is old.
    """

    def __init__(self, model: PreTrainedModel, options: ModelOptions) -> None:
        super().__init__(model, options)
        self.may_compile, self.num_renewals = options.compile, 0
        self.why_compiled = f"not compiled: {'nothing has run yet' if options.compile else 'model.compile=false'}"
        if self.is_spread:
            self.may_compile, self.why_compiled = False, "not compiled: Accelerate moves it from device to device"
        self._is_untried, self._is_not_kept, self._num_steps = bool(self.may_compile), False, 0
        self._program: CompiledForward | None = None
        self._hidden: tuple[int, ...] = ()  # indices of the hidden states that a program gives

    @property
    def compiled(self) -> CompiledForward | None:
        """The program that runs in the place of `run`, or ``None``; see `compile`."""
        self.compile()
        return self._program

    def compile(self) -> None:
        """Take or make the program that the options ask for, unless that was tried. An engine does so last of all."""
        if self._is_untried:
            self._is_untried = False
            self._program = self._compile()
            if self._is_not_kept and self._num_steps:
                self.compile_if_it_pays(self._num_steps)

    def compile_if_it_pays(self, num_steps: int) -> None:
        """With ``compile="auto"`` and no program kept, compile one if `num_steps` steps take long enough.

        Between runs only: a program rounds otherwise than the model, and each run has one arithmetic.
        """
        self._num_steps = num_steps
        if self._is_untried or not self._is_not_kept:
            return
        from emssd.model.compile.fingerprint import short_pass

        seconds = min(timeit.repeat(lambda: short_pass(self, self.run), number=1, repeat=3))
        if num_steps * seconds < _PAYS * _seconds(_TRACING * len(self.layers)):
            few = f"not compiled: {num_steps:,} steps at most are too few to pay for it"
            self.why_compiled = f"{few}; model.compile=true does it once, for all later runs"
            return
        self.may_compile = True
        self._program = self._compile(requested=False)
        self.num_renewals += 1  # it rounds otherwise than what computed the KV of prefixes

    def prepare_hidden(self, indices: Seq[int]) -> Streams:
        """From now on, passes can give these hidden states; see `emssd.model.hf.streams.Streams` for the indices.

        A program that does not give them is compiled again. Raises UnsupportedModelError with the reason.
        """
        self.streams = self.streams or find_streams(self)
        self.streams.check(indices)
        if not {*indices} <= {*self._hidden}:
            self._hidden = tuple(sorted({*self._hidden, *indices}))
            if self._program is not None:
                self._compile_again()
        return self.streams

    @property
    def why_not_invariant(self) -> str | None:
        """The reason why the bits of a row may depend on its batch, attention apart; ``None`` if they do not."""
        if self.compiled is not None:
            return self.compiled.why_not_invariant
        if self.arithmetic is None:
            return "model.batch_invariant=false"
        if self.keeps_states:
            return "some of its layers keep a state"
        missed = sorted(self.arithmetic.missed)
        return f"it calls {', '.join(missed)}" if missed else None

    def _compile_again(self) -> None:
        self._program = None  # first, as a program holds weights of its own
        self._program = self._compile()

    @torch.inference_mode(False)  # for the key of a program, which has what is traced outside of it
    def _compile(self, *, requested: bool = True) -> CompiledForward | None:
        """A program; ``None`` where there can be none, with a warning if it was `requested`."""
        from emssd.model.compile.compiled import CompiledForward, NotKeptError

        only_kept, self._is_not_kept = self.may_compile == "auto", False
        try:
            if self.counts_calls:
                raise CompileError("some of its layers keep a state, or attend twice, which no compiled program does")
            compiled = CompiledForward(self, self._hidden, only_kept=only_kept)
            if self.arithmetic is not None and (why := compiled.why_not_invariant) is not None:
                raise CompileError(f"model.batch_invariant=true, and {why}")
        except CompileError as error:
            self._is_not_kept = isinstance(error, NotKeptError)
            self.why_compiled = f"not compiled: {error}"
            if requested and not only_kept:
                warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None
        self.why_compiled = f"compiled: {compiled.origin}"
        return compiled


def _seconds(tracing: float, waiting: float = 1.0) -> float:
    """Seconds on the clock for the whole; a second of a processor takes `waiting` seconds."""
    return tracing * (1 + _PER_TRACED) + _FIXED * waiting


class Compiling:
    """Within, something is compiled: its layers are traced one by one, and then compilers run.

    Their time is estimated from that of tracing, on the processor and on the clock. Log records hold this as their
    ``compiling``.
    """

    def __init__(self, what: str, num_layers: int) -> None:
        self.title, self.num_traced, self.ended = f"compiling {what}", 0, False
        self._num_layers, self._start, self._seconds = num_layers, (monotonic(), process_time()), 0.0

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1."""
        return min((monotonic() - self._start[0]) / self._total(), 0.99) if self.num_traced else 0.0

    def _total(self) -> float:
        if self._seconds:
            return self._seconds
        elapsed, busy = monotonic() - self._start[0], process_time() - self._start[1]
        return _seconds(elapsed * self._num_layers / self.num_traced, elapsed / max(busy, 1e-3))

    @property
    def clock(self) -> str:
        """The time since the start, and the time left."""
        elapsed, share = monotonic() - self._start[0], self.share
        left = f", about {_clock(elapsed / share - elapsed)} left" if share and not self.ended else ""
        return _clock(elapsed) + left

    def __enter__(self) -> Self:
        self._tell(" …")
        return self

    def traced(self) -> None:
        self.num_traced = self._num_layers
        self._seconds = self._total()
        self._tell(f": {self.clock}")

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._tell(f" took {self.clock}")

    def _tell(self, text: str) -> None:
        logging.getLogger("emssd").info("%s%s", self.title, text, extra={"compiling": self})


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
