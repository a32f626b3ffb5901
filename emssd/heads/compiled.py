"""`CompiledHead`: the forward pass of a trained head as one compiled program, as `model.compile` makes of a model."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from emssd.attention import additive_mask, masked_attention
from emssd.errors import CompileError, EmssdError
from emssd.model import program, tracing
from emssd.model.fingerprint import fingerprint_of
from emssd.model.int8 import round_drafter
from emssd.model.program import Attend, Chain, Program, declare_operators
from emssd.model.proven import difference, proven
from emssd.native import CacheError, Entry, NativeError

if TYPE_CHECKING:
    from emssd.attention import StepPlan
    from emssd.attention.native import NativeStep
    from emssd.heads.head import Head

__all__ = ["CompiledHead", "compiled_head"]

logger = logging.getLogger("emssd")

_SHORT = 5  # tokens of the pass by which a program is recognised
_WRONG = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,
}  # standard deviations that drafts of a right program never differ by


def compiled_head(head: Head) -> CompiledHead | None:
    """The compiled program of `head`, whose weights are rounded; ``None``, with a warning, where there can be none."""
    round_drafter(head)
    try:
        return CompiledHead(head)
    except CompileError as error:
        warnings.warn(f"the drafter's head runs without model.compile: {error}", RuntimeWarning, stacklevel=2)
        return None


class CompiledHead:
    """The compiled forward pass of one head on a CPU, with its logits if it needs nothing of the target for them.

    Its weights must stay as they are.

    Args:
        head: with its weights.

    Raises:
        CompileError: no C++ compiler, a cache that others can write, or a head that cannot be traced.
    """

    def __init__(self, head: Head) -> None:
        weight = next(head.parameters())
        if weight.device.type != "cpu":
            raise CompileError(f"model.compile is for CPUs, and the head is on {weight.device}")
        example = (
            torch.linspace(-1, 1, _SHORT * head.input_size).view(1, _SHORT, -1).to(weight.dtype),
            torch.arange(_SHORT).unsqueeze(0),
        )
        traced = _Traced(head)
        own_linears = tracing.has_kernel(weight.dtype)

        def write(folder: Path) -> None:
            logger.info("compiling the drafter's %s, once; this takes some 15 s …", type(head).__name__)
            kept = torch.arange(_SHORT - 1)
            tracing.compile_module(traced, (*example, kept, torch.tensor(0)), folder, own_linears=own_linears)

        def eagerly() -> tuple[torch.Tensor, ...]:
            return traced.outputs(*example, torch.arange(_SHORT), lambda layer, *qkv: _causal(head, layer, *qkv))

        def take(found: Entry) -> str | None:
            vars(self).pop("_program", None)  # its weights go before there are others
            self._program = Program(found, head)
            got = self(*example, lambda layer, *qkv: _causal(head, layer, *qkv), torch.arange(_SHORT))
            self._has_logits = len(got) > 1
            far = [difference(*pair) for pair in zip(got, right, strict=True)]
            is_right = all(each <= _WRONG.get(weight.dtype, 0.2) for each in far)
            return None if is_right else f"its outputs differ by {far} standard deviations"

        try:
            declare_operators()
            sources = [Path(file).read_text() for file in (__file__, program.__file__, tracing.__file__)]
            key, right = fingerprint_of(head, eagerly, sources)
            proven("heads", key, write, take)
        except (NativeError, CacheError) as error:
            raise CompileError(str(error)) from error
        except EmssdError:
            raise
        except Exception as error:  # a head's own code may raise anything
            reason = f"{type(error).__name__}: {tracing.first_line(error)}"
            raise CompileError(f"{type(head).__name__} cannot be compiled: {reason}") from error

    def __call__(
        self,
        inputs: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        kept: torch.Tensor,
        step: NativeStep | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run it on ``inputs [b, n, input_size]`` at ``position_ids [b, n]``.

        Args:
            inputs, position_ids, attend: as `Head.forward` takes them.
            kept: ``[m]`` places of the tokens whose outputs are wanted, in each of the `b`.
            step: what `attend` does, where C++ code can do it.

        Returns:
            Hidden states ``[b * m, hidden_size]``, and logits ``[b * m, draft_vocab_size]`` if the head has its own.
        """
        batch, num_tokens, _ = inputs.shape
        if batch > 1:  # the program takes one row of tokens, and only `attend` knows where rows begin
            starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
            inputs, position_ids, kept = (
                inputs.view(1, -1, inputs.shape[-1]),
                position_ids.view(1, -1),
                (starts + kept).flatten(),
            )
        return tuple(self._program([inputs, position_ids, kept], attend, batch * num_tokens, step))

    def run_chain(
        self, inputs: torch.Tensor, plan: StepPlan, step: NativeStep, chain: Chain
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Chains behind ``inputs [1, n, input_size]``, see `Program.run_chain`; ``None`` without logits of its own."""
        if not self._has_logits:
            return None
        return self._program.run_chain([inputs, plan.position_ids, plan.logits_to_keep], step, chain)


class _Traced(nn.Module):
    """What is exported."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.model = head

    def forward(
        self, inputs: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor, handle: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.emssd_native.attend_layer(query, key, value, handle, layer)
            return out

        return self.outputs(inputs, position_ids, kept, attend)

    def outputs(
        self, inputs: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states of the tokens at ``kept [m]``, and logits of a head that has its own projection."""
        hidden = self.model(inputs, position_ids, attend)[0, kept]
        logits = self.model.own_logits(hidden)
        return (hidden,) if logits is None else (hidden, logits)


def _causal(head: Head, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one short sequence."""
    bias = additive_mask(torch.ones(1, len(query), len(query), dtype=torch.bool).tril(), query.dtype)
    return masked_attention(query[None], key[None], value[None], bias, head.specs[layer])[0].contiguous()
