"""`CompiledHead`: the forward pass of a trained head as one compiled program, as `model.compile` makes of a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from emssd.attention import additive_mask, masked_attention
from emssd.errors import CompileError
from emssd.model.compile import tracing
from emssd.model.compile.compilable import Compiling
from emssd.model.compile.compiled import ProvenProgram, sources
from emssd.model.compile.fingerprint import fingerprint
from emssd.model.compile.packed import round_drafter
from emssd.model.compile.tracing import in_one_row
from emssd_heads.layers import Attend

if TYPE_CHECKING:
    from emssd.attention import NativeStep
    from emssd_heads.head import Head

__all__ = ["CompiledHead", "compiled_head"]

_SHORT = 5  # tokens of the pass by which a program is recognised
_WRONG = {torch.float64: 1e-6, torch.float32: 1e-2}  # a right program's drafts differ by fewer standard deviations


def compiled_head(head: Head) -> CompiledHead | None:
    """The compiled program of `head`, whose weights are rounded; ``None``, with a warning, where there can be none."""
    round_drafter(head)
    try:
        return CompiledHead(head)
    except CompileError as error:
        warnings.warn(f"the drafter's head runs without model.compile: {error}", RuntimeWarning, stacklevel=2)
        return None


class CompiledHead(ProvenProgram):
    """The compiled forward pass of one head on a CPU, with logits of the head's own. Its weights must not change.

    Raises:
        CompileError: as of `ProvenProgram`, or another device.
    """

    kind = "heads"

    def __init__(self, head: Head) -> None:
        weight = next(head.parameters())
        if weight.device.type != "cpu":
            raise CompileError(f"model.compile is for CPUs, and the head is on {weight.device}")
        self._head, self._dtype = head, weight.dtype
        self._example = (
            torch.linspace(-1, 1, _SHORT * head.input_size).view(1, _SHORT, -1).to(weight.dtype),
            torch.arange(_SHORT).unsqueeze(0),
        )
        super().__init__(head)

    def key(self) -> str:
        return fingerprint(self._head, sources(__file__), lenient=True)

    def expected(self) -> Seq[torch.Tensor]:
        with torch.inference_mode():
            return _Traced(self._head).outputs(*self._example, torch.arange(_SHORT), self._causal)

    def compile(self, folder: Path) -> None:
        inputs = (*self._example, torch.arange(_SHORT - 1), torch.tensor(0))
        with Compiling(f"the drafter's {type(self._head).__name__}", len(self._head.specs)) as work:
            tracing.compile_module(
                _Traced(self._head), inputs, folder, work, own_linears=tracing.has_kernel(self._dtype)
            )

    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        outputs = self(*self._example, self._causal, torch.arange(_SHORT))
        return [("outputs", value, _WRONG.get(self._dtype, 0.2)) for value in outputs]

    def _causal(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        bias = additive_mask(torch.ones(1, len(query), len(query), dtype=torch.bool).tril(), query.dtype)
        return masked_attention(query[None], key[None], value[None], bias, self._head.specs[layer])[0].contiguous()

    def __call__(
        self,
        inputs: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        kept: torch.Tensor,
        step: NativeStep | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run it on ``inputs [b, n, input_size]`` at ``position_ids [b, n]``, for the tokens ``kept [m]`` of each row.

        With a `step`, C++ code attends. Returns hidden states ``[b * m, hidden_size]``, and logits
        ``[b * m, draft_vocab_size]`` if the head has its own.
        """
        batch, num_tokens, _ = inputs.shape
        kept = in_one_row(kept, batch, num_tokens)
        inputs, position_ids = inputs.view(1, -1, inputs.shape[-1]), position_ids.view(1, -1)
        return tuple(self._program([inputs, position_ids, kept], attend, step))


class _Traced(nn.Module):
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
