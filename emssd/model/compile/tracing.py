"""From a module to a compiled program: `torch.export` traces one step, and Inductor compiles it ahead of time."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from emssd.attention import LayerSpec
from emssd.errors import CompileError
from emssd.errors.faults import described
from emssd.model.compile.compilable import Compiling
from emssd.model.compile.fingerprint import named_tensors
from emssd.model.compile.linears import replace_by, with_one_input
from emssd.model.compile.program import CONSTANTS, LINEARS, PREFIX, PROGRAM
from emssd.native import private_folder, room_hint

if TYPE_CHECKING:
    from emssd.model.hf.hooked import HookedModel

__all__ = ["Traced", "compile_module", "compile_program", "export", "has_kernel", "in_one_row"]

_MAX_TOKENS = 1 << 20  # of one step
_PLAIN_PRODUCTS = {"mm", "bmm", "matmul", "linear"}
_PRODUCTS = {"addmm", "addbmm", "baddbmm", "addmv", "mv", "dot", "inner", "einsum", "tensordot", "_grouped_mm",
             "conv1d", "conv2d", "convolution", "scaled_dot_product_attention", *_PLAIN_PRODUCTS}  # fmt: skip


class Traced(torch.nn.Module):
    """The module to export: one step of a model. It gives logits, and the hidden states of these indices.

    Args:
        attend: the operator that computes attention from queries, keys, values, ``handle`` and the index of a layer.
        work: is told how many layers are traced.
    """

    def __init__(
        self,
        target: HookedModel,
        hidden: tuple[int, ...],
        attend: Callable[..., torch.Tensor],
        work: Compiling | None = None,
    ) -> None:
        super().__init__()
        self.model = target.model
        self._target, self._hidden, self._attend, self._work = target, hidden, attend, work

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, handle: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            if seen != self._target.layers[layer]:
                raise CompileError(f"layer {layer} attends by {seen}, and by {self._target.layers[layer]} before")
            if self._work is not None:
                self._work.num_traced = layer + 1
            return self._attend(*qkv, handle, layer)

        states = dict.fromkeys(self._hidden, input_ids)
        logits = self._target.run(input_ids, position_ids, attend, logits_to_keep, hidden=states)
        return logits, *states.values()


def compile_program(target: HookedModel, folder: Path, hidden: tuple[int, ...] = ()) -> None:
    """Trace and compile `target` into `folder`, see `compile_module`. Raises CompileError: that fails."""
    tokens = torch.arange(24) % target.vocab_size
    inputs = (tokens.unsqueeze(0), torch.arange(24).unsqueeze(0), torch.arange(20), torch.tensor(0))
    with Compiling(type(target.model).__name__, len(target.layers)) as work:
        module = Traced(target, hidden, torch.ops.emssd_native.attend_layer, work)
        compile_module(module, inputs, folder, work, own_linears=has_kernel(target.dtype))


def export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """Trace `module` for any number of tokens; for `inputs` see `compile_module`. It raises almost anything."""
    num_tokens, num_kept = (torch.export.Dim(name, max=_MAX_TOKENS) for name in ("num_tokens", "num_kept"))
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # else Inductor keeps its files in a folder in /tmp
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder("inductor"))
    shapes = ({1: num_tokens}, {1: num_tokens}, {0: num_kept}, None)
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def compile_module(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, work: Compiling, *, own_linears: bool
) -> None:
    """Trace and compile `module`, whose attribute ``model`` has all its weights. Raises CompileError: that fails.

    Args:
        inputs: an example: two with tokens along axis 1, indices ``[m]`` of tokens to keep, and the handle.
        folder: gets the program, the names of its linear layers' tensors, and its constants.
        work: is told when the module is traced.
        own_linears: use the linear layers of `emssd.native`, with weights in the layout of their kernel.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about its own code
            program = export(module, inputs)
            work.traced()
            linears = _replace_linears(program) if own_linears else []
            products = {"linears": linears, "others": _other_products(program)}
            (folder / LINEARS).write_text(json.dumps(products, indent=1))
            named = {f"{PREFIX}{name}" for name in named_tensors(cast("torch.nn.Module", module.model))}
            torch.save({name: program.constants[name] for name in program.constants.keys() - named}, folder / CONSTANTS)
            # Small tensors would be written into the code: weights of a checkpoint, in a program for all of them.
            options = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
            # Round wherever the module rounds, also between fused operators: else a program that gives hidden states
            # would have other bits.
            options["emulate_precision_casts"] = True
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / PROGRAM), inductor_configs=options
            )
    except Exception as error:  # tracing and compiling raise almost anything
        name = type(module.model).__name__
        raise CompileError(f"{name} cannot be compiled: {described(error)}{room_hint(error)}") from error


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether `emssd.native` has linear layers of this type; others are compiled with the rest."""
    return dtype in (torch.float32, torch.bfloat16)


def _replace_linears(program: torch.export.ExportedProgram) -> list[dict[str, Any]]:
    """Put our kernel in the place of linear layers, one for those of the same input. Returns what each consists of."""
    graph, linears = program.graph, list[dict[str, Any]]()
    handle = next(node for node in graph.nodes if node.name == "handle")
    for layers in with_one_input(graph, program.graph_signature.inputs_to_parameters):
        first = layers[0][1]
        names = {
            "weights": [linear.weight for _, linear in layers],
            "biases": [bias for _, linear in layers for bias in linear.biases],
        }
        linears.append(names | {"transposed": first.is_transposed})
        nodes = [node for node, _ in layers]
        with graph.inserting_before(nodes[0]):
            size = sum(node.meta["val"].shape[-1] for node in nodes)
            operator = torch.ops.emssd_native.linear.default
            replace_by(nodes, graph.call_function(operator, (first.source, handle, len(linears) - 1, size)))
    program.graph_module.recompile()
    return linears


def _other_products(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the other operators that add up products, in an order that may depend on the number of rows.

    Operators of other libraries, such as Transformers' experts, count.
    """
    names = set[str]()
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "emssd_native":
            name = node.target._opname
            size = node.args[0].meta["val"].shape[-1] if name in _PLAIN_PRODUCTS else None
            is_one = isinstance(size, int) and size == 1  # as in rotary embeddings: nothing is added up
            if node.target.namespace != "aten" or (name in _PRODUCTS and not is_one):
                names.add(name)
    return sorted(names)


def in_one_row(kept: torch.Tensor, batch: int, num_tokens: int) -> torch.Tensor:
    """The indices ``[batch * m]`` of tokens to keep, ``[m]`` in each of `batch` rows, in one row of all tokens."""
    starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
    return (starts + kept).flatten() if batch > 1 else kept
