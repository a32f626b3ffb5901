"""From a model to a compiled program: `torch.export` traces one step, and Inductor compiles it ahead of time."""

from __future__ import annotations

import json
import logging
import warnings
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import LayerSpec
from emssd.errors import CompileError
from emssd.native import room_hint, trusted

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = [
    "CONSTANTS",
    "LINEARS",
    "PREFIX",
    "PROGRAM",
    "compile_module",
    "compile_program",
    "expected_seconds",
    "first_line",
    "has_kernel",
]

PROGRAM, LINEARS, CONSTANTS = "program.pt2", "linears.json", "constants.pt"
PREFIX = "model."  # of the model's own names in the program
_MAX_TOKENS = 1 << 20  # of one step

logger = logging.getLogger("emssd")


class _Traced(torch.nn.Module):
    """The module to export: one step, with attention as an operator. It gives logits, and the wanted hidden states."""

    def __init__(self, target: HookedModel, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.model = target.model
        self._target, self._hidden = target, hidden

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, handle: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self._target.layers[layer]:
                raise CompileError(f"layer {layer} attends by {seen}, and by {self._target.layers[layer]} before")
            out: torch.Tensor = torch.ops.emssd_native.attend_layer(query, key, value, handle, layer)
            return out

        states = dict.fromkeys(self._hidden, input_ids)
        logits = self._target.run(input_ids, position_ids, attend, logits_to_keep, hidden=states)
        return logits, *states.values()


def compile_program(target: HookedModel, folder: Path, hidden: tuple[int, ...] = ()) -> None:
    """Trace and compile `target` into `folder`, see `compile_module`. Raises CompileError: that fails."""
    name, seconds = type(target.model).__name__, expected_seconds(len(target.layers))
    logger.info("compiling the forward pass of %s, once; this takes about %d s …", name, seconds)
    tokens = torch.arange(24) % target.vocab_size
    inputs = (tokens.unsqueeze(0), torch.arange(24).unsqueeze(0), torch.arange(20), torch.tensor(0))
    compile_module(_Traced(target, hidden), inputs, folder, own_linears=has_kernel(target.dtype))


def expected_seconds(num_layers: int) -> int:
    """About how long compiling a model takes."""
    return 10 + 2 * num_layers


def compile_module(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, *, own_linears: bool
) -> None:
    """Trace and compile `module`; `folder` gets the program, what its linear layers consist of, and its constants.

    Args:
        module: whose attribute ``model`` has all its weights.
        inputs: an example: two with tokens along axis 1, the places ``[m]`` of those that are kept, and the handle.
        own_linears: use the linear layers of `emssd.native`, with weights in the layout of their kernel.

    Raises:
        CompileError: that fails.
    """
    num_tokens, num_kept = (torch.export.Dim(each, max=_MAX_TOKENS) for each in ("num_tokens", "num_kept"))
    try:
        _check_inductor()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about its own code
            shapes = ({1: num_tokens}, {1: num_tokens}, {0: num_kept}, None)
            program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
            linears = _replace_linears(program) if own_linears else []
            (folder / LINEARS).write_text(json.dumps(linears, indent=1))
            torch.save(dict(program.constants), folder / CONSTANTS)
            # Small tensors would be written into the code: weights of a checkpoint, in a program for all of them.
            options = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / PROGRAM), inductor_configs=options
            )
    except Exception as error:  # tracing and compiling raise almost anything
        reason = f"{type(error).__name__}: {first_line(error)}{room_hint(error)}"
        raise CompileError(f"{type(module.model).__name__} cannot be compiled: {reason}") from error


def _check_inductor() -> None:
    """Inductor takes what it has compiled before from a folder in ``/tmp``."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    trusted(Path(cache_dir()), variable="TORCHINDUCTOR_CACHE_DIR")


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether `emssd.native` has linear layers of this type; others are compiled with the rest."""
    return dtype in (torch.float32, torch.bfloat16)


def _replace_linears(program: torch.export.ExportedProgram) -> list[dict[str, list[str]]]:
    """Put our kernel in the place of linear layers, one for those of the same input. Returns what each consists of."""
    graph, parameters = program.graph, program.graph_signature.inputs_to_parameters
    every: list[Any] = list(graph.nodes)  # nodes, but their annotations do not say that their arguments are some here
    handle = next(node for node in every if node.name == "handle")
    together: dict[tuple[Any, bool], list[Any]] = {}
    for node in every:
        if node.target is torch.ops.aten.linear.default and all(each.name in parameters for each in node.args[1:]):
            together.setdefault((node.args[0], len(node.args) > 2), []).append(node)
    linears = []
    for (source, _), nodes in together.items():
        names = [[parameters[each.name].removeprefix(PREFIX) for each in node.args[1:]] for node in nodes]
        biases = [bias for _, *rest in names for bias in rest]
        linears.append({"weights": [weight for weight, *_ in names], "biases": biases})
        sizes = [node.args[1].meta["val"].shape[0] for node in nodes]
        with graph.inserting_before(nodes[0]):
            operator = torch.ops.emssd_native.linear.default
            joined = graph.call_function(operator, (source, handle, len(linears) - 1, sum(sizes)))
            joined.meta["val"] = nodes[0].meta["val"].new_empty(*nodes[0].meta["val"].shape[:-1], sum(sizes))
            for node, stop in zip(nodes, accumulate(sizes), strict=True):
                size = node.args[1].meta["val"].shape[0]
                part = joined
                if len(nodes) > 1:
                    part = graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, stop - size, stop))
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
    for nodes in together.values():
        for node in nodes:
            graph.erase_node(node)
    program.graph_module.recompile()
    return linears


def first_line(error: BaseException) -> str:
    """Of the message of an error, the first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
