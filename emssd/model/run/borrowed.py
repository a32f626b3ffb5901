"""`BorrowedTarget`: the target's embeddings, first layers, norm and LM head, for drafters that have none."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F

from emssd.attention import AttentionBackend
from emssd.errors import UnsupportedModelError
from emssd.model.hf.find_streams import find_streams
from emssd.model.hf.streams import Streams, replaced_forward
from emssd.model.run.rounded import RoundedRunner
from emssd.model.run.runner import CausalLMRunner, ModelRunner
from emssd.model.run.target import TargetModel

__all__ = ["BorrowedTarget"]

_PROPORTIONAL = 1e-2  # the largest relative residual for which embeddings count as a scaled copy, in bfloat16


class BorrowedTarget:
    """The parts of the target that a drafter may use. Nothing is copied: the weights are the target's own.

    Attributes:
        vocab_size: of the model.
        num_layers: decoder layers ``n``; hidden states have indices 0 to ``n``, and -1.
        device, dtype: of hidden states and logits.
    """

    def __init__(self, target: TargetModel) -> None:
        self.vocab_size, self.device, self.dtype = target.vocab_size, target.device, target.dtype
        self.num_layers = target.num_layers
        self._target, self._model = target, target.model
        self._sharing: list[RoundedRunner] = []
        self._runner: CausalLMRunner | None = None

    def rounded(self, bits: int, num_layers: int | None = None) -> RoundedRunner:
        """The model with rounded weights and the KV cache of the target, for `Drafter.propose`; see `RoundedRunner`."""
        self._check_together()
        if self._target.group.size > 1:
            raise UnsupportedModelError(
                "with model.tensor_parallel=true, no drafter rounds the weights of the target, of which this process "
                "has a part; choose another, such as drafter=suffix"
            )
        self._sharing.append(made := RoundedRunner(self._target, bits, num_layers))
        if (runner := self._runner) is not None:
            made.attach(runner)
        return made

    def attach(self, runner: CausalLMRunner) -> None:
        """Share the KV cache of `runner`, which runs the target, with the runners that `rounded` makes."""
        self._runner = runner
        for sharing in self._sharing:
            sharing.attach(runner)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self._model.config.get_text_config().hidden_size)

    @property
    def has_program(self) -> bool:
        """Whether the model runs as a compiled program."""
        return self._target.compiled is not None

    @property
    def is_compiled(self) -> bool:
        """Whether the model runs as a compiled program, and parts of a drafter may be compiled too."""
        return self._target.compiled is not None and self._target.may_compile is True

    @property
    def model(self) -> Any:
        """The model itself, for drafters with layers of its classes. It must stay as it is.

        `Drafter.propose` and `observe` may call it, with a KV cache that is not the engine's.
        """
        self._check_together()
        return self._model

    @property
    def config(self) -> dict[str, Any]:
        """The values of the model's config, for drafters with layers like the target's own."""
        return cast("dict[str, Any]", self._model.config.get_text_config().to_dict())

    def embed(self, token_ids: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        """``[n, width]`` embeddings of ``token_ids [n]`` as the model makes them, without positions.

        Some models multiply rows of the table by a number (Gemma, Granite); `raw` gives the rows as they are.
        """
        table = self._model.get_input_embeddings()
        if raw:
            if table.weight.is_meta:
                raise UnsupportedModelError(
                    "model.device_map keeps the embeddings in the host's memory, and the drafter reads them"
                )
            return _looked_up(token_ids.to(table.weight.device), table.weight).to(self.device)
        embedded: torch.Tensor = table(token_ids).to(self.device)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, width]`` the model's final norm of a residual stream ``hidden [n, hidden_size]``.

        Raises UnsupportedModelError: other code than a chain of modules follows the last layer.
        """
        if self._streams.tail is None:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} lends drafters no final norm: it does more than that behind its layers"
            )
        for module in self._streams.tail:
            hidden = module(hidden)
        return hidden.to(self.device)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, vocab]`` the logits that the model's own code makes of ``hidden [n, width]``, which is after `norm`."""
        token_ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        output = self._streams.output_type(last_hidden_state=hidden.unsqueeze(0))
        with self._target.lock, replaced_forward(self._streams.decoder, lambda *_, **__: output):
            return self._logits(token_ids)

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[n, vocab]`` the model's logits after each of ``token_ids [n]``, a whole text; nothing is cached."""
        return self._logits(token_ids)

    def _logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits
        return logits[0].to(self.device)

    def first_layers(self, num_layers: int, cache: AttentionBackend) -> ModelRunner:
        """The model's first `num_layers` decoder layers, from 1 to all, its final norm and its LM head, to draft with.

        `cache` holds their KV: ``make_cache`` of the drafter's context makes it, for the target's spec with only these
        layers. Raises UnsupportedModelError: the layers are not found, or others cannot be left out.
        """
        self._check_together()
        return CausalLMRunner(self._target, cache, num_layers)

    def _check_together(self) -> None:
        """Refuse to lend what Accelerate's hooks would move from device to device."""
        if self._target.is_spread:
            raise UnsupportedModelError(
                "with model.device_map, no drafter runs layers of the target or takes them; choose one that has a "
                "model or a head of its own, or reads tokens, such as drafter=suffix"
            )

    @cached_property
    def _streams(self) -> Streams:
        return self._target.streams or find_streams(self._target)

    @cached_property
    def _scale(self) -> float:
        """The factor of the model's embeddings in the input of its first layer; 1 if that is no multiple of them."""
        with torch.inference_mode():
            embedded = self._model.get_input_embeddings()(self._streams.ids).double()
            first = self._streams.first[0].double()
            if embedded.shape != first.shape or torch.equal(embedded, first):
                return 1.0
            scale = float((embedded * first).sum() / (embedded * embedded).sum())
            residual = float((first - scale * embedded).norm() / first.norm())
        return scale if residual < _PROPORTIONAL else 1.0


def _looked_up(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``[n, width]`` rows of a table, which may be in shards."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(table, DTensor):
        ids = DTensor.from_local(token_ids, table.device_mesh, [Replicate()])
        rows: Any = F.embedding(ids, table)
        return cast("torch.Tensor", rows.full_tensor())
    return F.embedding(token_ids, table)
