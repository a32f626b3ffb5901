"""What a compiled program depends on: all of a model but its weights.

Two views are taken together. The operators of one pass with their arguments are what the model computes, whoever
changed it and how; what the modules hold and their code tell what a pass of a few tokens does not.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emssd.attention import LayerSpec, additive_mask, masked_attention
from emssd.model.module_state import describe_classes, describe_modules, named_tensors, refuse_hooks
from emssd.native import kernels_key

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = ["fingerprint", "fingerprint_of", "short_pass"]

_LENGTHS = (5, 3)  # of the sequences of a short pass


def fingerprint(target: HookedModel, sources: Iterable[str], hidden: Seq[int] = ()) -> tuple[str, list[torch.Tensor]]:
    """A name for what the program of `target` depends on, and what the model gives in a `short_pass`.

    That is the model's code and state, not its weights; versions, machine and threads.

    Args:
        sources: of what makes the program.
        hidden: indices of the hidden states that it gives beside logits.

    Raises:
        CompileError: a program would not run part of the model, or a later run could not recognise it.
    """
    import transformers

    model = target.model
    refuse_hooks(model)
    tensors = named_tensors(model)
    trace = _Trace(tensors)
    with trace:
        given = short_pass(target, target.run, hidden)
    parts = chain(
        [transformers.__version__, str(target.layers)],
        _of_machine_and_code(model, tensors),
        sources,
        describe_modules(model),
        trace.lines,
        (f"hidden states {index}" for index in hidden),
    )
    return _digest(parts), given


def fingerprint_of(
    module: torch.nn.Module, run: Callable[[], tuple[torch.Tensor, ...]], sources: Iterable[str]
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """A name for what the program of a module of ours depends on, and what `run` gives.

    Args:
        module: which holds nothing beside its tensors that changes what `run` computes and is not seen in that.
        run: a short pass.
        sources: of what makes the program.
    """
    tensors = named_tensors(module)
    trace = _Trace(tensors)
    with trace, torch.inference_mode():
        given = run()
    return _digest(chain(_of_machine_and_code(module, tensors), sources, trace.lines)), given


def _of_machine_and_code(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    yield from (sys.version, str(torch.get_num_threads()), kernels_key())
    yield from (f"{name} {_layout(tensor)}" for name, tensor in tensors.items())
    yield from describe_classes(module)


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def short_pass(target: HookedModel, run: Callable[..., torch.Tensor], hidden: Seq[int] = ()) -> list[torch.Tensor]:
    """What `run`, like `HookedModel.run`, gives for two short sequences packed into one row.

    Returns:
        Logits ``[8, vocab]``, and for each of `hidden` the hidden states of that index ``[8, width]``.
    """
    lengths = [min(length, target.max_model_len) for length in _LENGTHS]
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    mask = (rows[:, None] == rows[None, :]).tril()

    def attend(
        layer: int, spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        seen = mask if spec.sliding_window is None else mask.triu(1 - spec.sliding_window)
        bias = additive_mask(seen[None], query.dtype)
        return masked_attention(query[None], key[None], value[None], bias, spec)[0].contiguous()

    tokens = (torch.arange(len(rows)) * 11 + 3) % target.vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])
    states = dict.fromkeys(hidden, tokens)
    with torch.inference_mode():
        logits = run(tokens[None], positions[None], attend, torch.arange(len(rows)), hidden=states)
    return [logits[0], *(states[index][0] for index in hidden)]


class _Trace(TorchDispatchMode):
    """Writes down each operator with its arguments: tensors by name, by what computed them, or by content."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no annotations
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one
        for name, tensor in tensors.items():
            self._name(tensor, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import Dynamo, for a second, to keep it from tracing this."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = f"{func} {self._words(args)} {self._words(kwargs or {})}"
        result = func(*args, **(kwargs or {}))
        for place, each in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(each, torch.Tensor):
                self._name(each, f"%{len(self.lines)}.{place}")
        self.lines.append(line)
        return result

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self._names.setdefault(id(tensor), name)
        self._alive.append(tensor)

    def _words(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._names:
                self._name(value, f"{_layout(value)} {_content(value)}")
            return self._names[id(value)]
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self._words, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}={self._words(each)}' for key, each in value.items())}}}"
        return repr(value)


def _layout(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _content(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()
