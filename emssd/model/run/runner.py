"""`ModelRunner`: a model and its KV cache. The decode loop, the check and draft models run through it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from emssd.attention import AttentionBackend, Kept, KVUsage, PackedInputs, StepPlan
from emssd.errors import UnsupportedModelError
from emssd.model.hf.recurrent_states import StateCache
from emssd.model.run.target import Computed, TargetModel

__all__ = ["CausalLMRunner", "ModelOutput", "ModelRunner", "likeliest", "run_planned"]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results of one step.

    Attributes:
        logits: ``[R, vocab]``, one row for each of the step's `PackedInputs.logit_rows`.
        num_padding: padding tokens that were computed beside the ``nnz`` real ones.
        hidden: ``[nnz, width]`` by index, the hidden states of `ModelRunner.take_hidden`; good until the next step.
        plan_seconds: host time of planning attention, apart from the forward pass.
        greedy: ``[R]`` the most probable tokens, on their way to pinned memory, if the pass was recorded with them; see
            `PackedInputs.greedy`.
    """

    logits: torch.Tensor
    num_padding: int = 0
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    plan_seconds: float = 0.0
    greedy: torch.Tensor | None = None


class ModelRunner(ABC):
    """A model and its KV cache.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: no sequence grows beyond it.
        device: of its computation.
        precision: the dtype whose roundings tell how far two computations may differ.
    """

    vocab_size: int
    max_model_len: int
    device: torch.device
    precision: torch.dtype

    def begin(self) -> None:
        """A run begins: no row holds KV. Raises UnsupportedModelError: the model cannot be served as it is now."""

    @abstractmethod
    def run(self, packed: PackedInputs) -> ModelOutput:
        """Compute one ragged step. The KV of its tokens stays until `commit` or `release` drops it.

        After a step that fails, the same or other rows may be run without a commit.
        """

    def run_chain(
        self, packed: PackedInputs, lengths: Seq[int], vocab_size: int, temperature: float
    ) -> torch.Tensor | None:
        """Compute passes of one token for each row as one recording; each pass reads the likeliest tokens of the last.

        Args:
            packed: the first pass.
            lengths: ``[B]`` number of passes in which a row takes part, at least 1.
            vocab_size: tokens are below it.
            temperature: divides the logits.

        Returns:
            ``[2, k, B]`` float64: the likeliest token after each pass, and the logarithm of its probability; anything
            after the last pass of a row. ``None``: nothing was done, as the backend records nothing.
        """
        return None

    def take_hidden(self, indices: Seq[int]) -> None:
        """Give these hidden states, see `Drafter.hidden_layers`, in each `ModelOutput`. Called before the first step.

        Raises UnsupportedModelError: it has none, or not these.
        """
        if indices:
            raise UnsupportedModelError(f"a {type(self).__name__} has no hidden states to give to drafters")

    @abstractmethod
    def commit(self, kept: Kept) -> None:
        """After verification, drop the KV of rejected tokens."""

    @abstractmethod
    def release(self, request_ids: Iterable[str]) -> None:
        """Free all KV of these requests. Unknown ids are no error."""

    @abstractmethod
    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        """Whether the cache can hold these sequences, each at this many tokens, and no others."""

    @property
    def shared_kv(self) -> AttentionBackend | None:
        """The backend in which rows that begin alike share KV; ``None`` if they share none."""
        return None

    def forget_prefixes(self) -> None:
        """Let no row adopt KV that was computed before."""
        if self.shared_kv is not None:
            self.shared_kv.forget_prefixes()

    @property
    def batch_invariance(self) -> str:
        """In a line, whether the logits of a row are the same bits for any batch, drafts and pieces of its prompt."""
        return "not known"

    @property
    @abstractmethod
    def usage(self) -> KVUsage:
        """KV memory taken now and at most."""


class CausalLMRunner(ModelRunner):
    """A Hugging Face model on one device, with its KV in an attention backend.

    Args:
        backend: allocated for the layers that are run.
        num_layers: run only so many of the first layers, uncompiled, then the final norm and the LM head; ``None`` for
            all. Hidden states are taken up to the last of these layers, and after the norm (-1).

    Raises:
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """

    _hidden: tuple[int, ...] = ()  # indices of hidden states that are wanted
    _peak = 0  # bytes of KV and states that rows held

    def __init__(self, model: TargetModel, backend: AttentionBackend, num_layers: int | None = None) -> None:
        if num_layers is not None:
            assert 1 <= num_layers <= model.num_layers, f"{num_layers} of {model.num_layers} layers"
            model.prepare_hidden(()).check_cut()
        self.model, self.backend, self.num_layers = model, backend, num_layers
        self.vocab_size, self.max_model_len = model.vocab_size, model.max_model_len
        self.device, self.precision = model.device, model.precision
        self._num_renewals, self._layers = model.num_renewals, model.layers
        self._states = StateCache() if model.keeps_states else None

    def begin(self) -> None:
        before, self._num_renewals = self._num_renewals, self.model.begin()
        if self._num_renewals != before:
            self.backend.forget_steps()
            self.forget_prefixes()
        if self._layers != self.model.layers and not self.backend.take_sinks(self.model.layers):
            raise UnsupportedModelError(
                f"the model's attention sinks have changed, and the KV cache of this engine, a "
                f"{type(self.backend).__name__}, takes no others; make the engine again"
            )
        self._layers = self.model.layers

    def run(self, packed: PackedInputs) -> ModelOutput:
        start = time.perf_counter()
        plan = self.backend.plan(packed)
        plan_seconds = time.perf_counter() - start
        if self._states is not None:
            plan = replace(plan, replay=None)  # a recording would read the states of its first rows
        in_states = nullcontext() if self._states is None else self._states.step(packed, plan.token_index)
        group = self.model.group
        with nullcontext() if group.size == 1 else group.step(packed), in_states:
            logits, computed = self._compute(plan)
        num_tokens, hidden = packed.num_tokens, dict[int, torch.Tensor]()
        for index in self._hidden:
            hidden[index] = plan.packed(computed[index], num_tokens)
        greedy = None if plan.landing is None else plan.landing[: len(packed.logit_rows)]
        return ModelOutput(logits, plan.input_ids.numel() - num_tokens, hidden, plan_seconds, greedy)

    def run_chain(
        self, packed: PackedInputs, lengths: Seq[int], vocab_size: int, temperature: float
    ) -> torch.Tensor | None:
        def one_pass(plan: StepPlan, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            plan = replace(plan, input_ids=ids.unsqueeze(0), logit_index=None, replay=None)
            likely = likeliest(self._compute(plan).logits[:, :vocab_size], 1, 1.0 / temperature)[..., 0]
            return likely, likely[0].long()

        if self._states is not None or self.model.group.size > 1:
            return None
        return run_planned(self.backend, packed, lengths, None, one_pass)

    def _compute(self, plan: StepPlan) -> Computed:
        return self.model(plan, self.backend, self._hidden, self.num_layers)

    def take_hidden(self, indices: Seq[int]) -> None:
        if self.num_layers is not None:  # no compiled program is made for them
            self.model.prepare_hidden(()).check(indices)
        elif indices:
            self.model.prepare_hidden(indices)
        self._hidden = tuple(indices)

    def commit(self, kept: Kept) -> None:
        self.backend.commit(kept)
        if self._states is not None:
            self._states.commit(kept)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = [*request_ids]
        self.backend.release(request_ids)
        if self._states is not None:
            self._states.release(request_ids)

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self.backend.fits(kv_lens)

    @property
    def shared_kv(self) -> AttentionBackend | None:
        shares = self.backend.prefix_unit and self._states is None  # a state is that of one row's tokens
        return self.backend if shares else None

    @property
    def batch_invariance(self) -> str:
        why = self.model.why_not_invariant
        if why is None and self.model.layers and not self.backend.batch_invariant:
            why = f"the attention of {type(self.backend).__name__} promises no bits"
        return "yes" if why is None else f"no: {why}"

    @property
    def usage(self) -> KVUsage:
        usage = self.backend.kv_usage
        if self._states is None:
            return usage
        held = usage.held + self._states.used_bytes
        self._peak = max(self._peak, held)
        return replace(usage, held=held, peak_held=self._peak)


def likeliest(logits: torch.Tensor, width: int, scale: float) -> torch.Tensor:
    """``[2, n, width]`` float64, by ``logits [n, vocab]`` times `scale`: the most probable ids, and the logarithms of
    their probabilities. The host waits for nothing.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    values, ids = scaled.max(dim=1, keepdim=True) if width == 1 else scaled.topk(width, dim=1)
    return torch.stack([ids.double(), (values - scaled.logsumexp(dim=1, keepdim=True)).double()])


def run_planned(
    backend: AttentionBackend,
    packed: PackedInputs,
    lengths: Seq[int],
    first: Callable[[StepPlan], torch.Tensor] | None,
    one_pass: Callable[[StepPlan, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor | None:
    """Plan all passes of `ModelRunner.run_chain`, and run them as one; ``None`` if the backend plans each by itself.

    Args:
        first: makes the input of the first pass, at an address that stays; ``None`` for the token ids of its plan.
        one_pass: computes, of a plan and an input, ``[2, n]`` the likeliest tokens, and the input of the next pass.
    """
    plans = backend.plan_chain(packed, lengths)
    if not plans:
        return None
    start = plans[0].input_ids[0] if first is None else first(plans[0])

    def compute() -> torch.Tensor:
        likely, values = list[torch.Tensor](), start
        for plan in plans:
            tokens, values = one_pass(plan, values)
            likely.append(tokens)
        return torch.stack(likely, dim=1)

    recorded: torch.Tensor = compute() if plans[0].replay is None else plans[0].replay(compute)
    return recorded[..., : packed.num_rows]
