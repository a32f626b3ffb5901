"""From a module to a compiled program: `torch.export` traces one step, and Inductor compiles it ahead of time.

A `ProvenProgram` is kept on disk, and is taken only if it computes the same as its module.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from emssd.attention import LayerSpec
from emssd.errors import CompileError, EmssdError
from emssd.errors.faults import described
from emssd.model.compile import program as loaded
from emssd.model.compile.compile_time import Compiling
from emssd.model.compile.fingerprint import UnnamedError
from emssd.model.compile.program import CONSTANTS, LINEARS, PREFIX, PROGRAM, Program, declare_operators
from emssd.native import CacheError, Entry, NativeError, entry, is_kept, private_folder, room_hint

if TYPE_CHECKING:
    from emssd.model.hf.interface import RunnableModel

__all__ = [
    "NotKeptError",
    "ProvenProgram",
    "Traced",
    "compile_module",
    "compile_program",
    "export",
    "has_kernel",
    "in_one_row",
    "sources",
]

_MAX_TOKENS = 1 << 20  # of one step
_PLAIN_PRODUCTS = {"mm", "bmm", "matmul", "linear"}
_PRODUCTS = {"addmm", "addbmm", "baddbmm", "addmv", "mv", "dot", "inner", "einsum", "tensordot", "_grouped_mm",
             "conv1d", "conv2d", "convolution", "scaled_dot_product_attention", *_PLAIN_PRODUCTS}  # fmt: skip

logger = logging.getLogger("emssd")


class Traced(torch.nn.Module):
    """The module to export: one step of a model. It gives logits, and the hidden states of these indices.

    Args:
        attend: the operator that computes attention from queries, keys, values, ``handle`` and the index of a layer.
        work: is told how many layers are traced.
    """

    def __init__(
        self,
        target: RunnableModel,
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
        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self._target.layers[layer]:
                raise CompileError(f"layer {layer} attends by {seen}, and by {self._target.layers[layer]} before")
            if self._work is not None:
                self._work.num_traced = layer + 1
            return self._attend(query, key, value, handle, layer)

        states = dict.fromkeys(self._hidden, input_ids)
        logits = self._target.run(input_ids, position_ids, attend, logits_to_keep, hidden=states)
        return logits, *states.values()


def compile_program(target: RunnableModel, folder: Path, hidden: tuple[int, ...] = ()) -> None:
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
        inputs: an example: two with tokens along axis 1, the places ``[m]`` of those that are kept, and the handle.
        folder: gets the program, what its linear layers consist of, and its constants.
        work: is told when the module is traced.
        own_linears: use the linear layers of `emssd.native`, with weights in the layout of their kernel.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about its own code
            program = export(module, inputs)
            work.traced()
            linears = _replace_linears(program) if own_linears else []
            found = {"linears": linears, "others": _other_products(program)}
            (folder / LINEARS).write_text(json.dumps(found, indent=1))
            torch.save(dict(program.constants), folder / CONSTANTS)
            # Small tensors would be written into the code: weights of a checkpoint, in a program for all of them.
            options = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
            # Values are rounded wherever the module rounds them, also between operators that are fused: else a program
            # that gives hidden states would round where others do not, and have other bits.
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


class _Linear(NamedTuple):
    """A linear layer of a graph: its input, the name of its weight, and of its bias if it has one."""

    source: Any
    weight: str
    biases: tuple[str, ...]
    is_transposed: bool  # ``[in, out]``, as GPT-2 has it


def _linear_of(node: Any, parameters: Mapping[str, str]) -> _Linear | None:
    """The linear layer that a `node` computes, if its tensors are all parameters; ``None`` if it computes none."""
    if node.target is torch.ops.aten.linear.default:
        source, weight, *biases = node.args
    elif node.target is torch.ops.aten.addmm.default and not node.kwargs:
        bias, source, weight = node.args
        biases = [bias]
    else:
        return None
    if any(each.name not in parameters for each in (weight, *biases)):
        return None
    name, *others = (parameters[each.name].removeprefix(PREFIX) for each in (weight, *biases))
    return _Linear(source, name, tuple(others), node.target is torch.ops.aten.addmm.default)


def _replace_linears(program: torch.export.ExportedProgram) -> list[dict[str, Any]]:
    """Put our kernel in the place of linear layers, one for those of the same input. Returns what each consists of."""
    graph, parameters = program.graph, program.graph_signature.inputs_to_parameters
    every: list[Any] = list(graph.nodes)  # nodes, but their annotations do not say that their arguments are some here
    handle = next(node for node in every if node.name == "handle")
    together: dict[tuple[Any, bool, bool], list[tuple[Any, _Linear]]] = {}
    for node in every:
        if (linear := _linear_of(node, parameters)) is not None:
            key = linear.source, bool(linear.biases), linear.is_transposed
            together.setdefault(key, []).append((node, linear))
    linears = []
    for (source, _, is_transposed), layers in together.items():
        names = {
            "weights": [linear.weight for _, linear in layers],
            "biases": [bias for _, linear in layers for bias in linear.biases],
        }
        linears.append(names | {"transposed": is_transposed})
        nodes = [node for node, _ in layers]
        sizes = [node.meta["val"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            operator = torch.ops.emssd_native.linear.default
            joined = graph.call_function(operator, (source, handle, len(linears) - 1, sum(sizes)))
            joined.meta["val"] = nodes[0].meta["val"].new_empty(*nodes[0].meta["val"].shape[:-1], sum(sizes))
            for node, stop in zip(nodes, accumulate(sizes), strict=True):
                size = node.meta["val"].shape[-1]
                part = joined
                if len(nodes) > 1:
                    part = graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, stop - size, stop))
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
    for layers in together.values():
        for node, _ in layers:
            graph.erase_node(node)
    program.graph_module.recompile()
    return linears


def _other_products(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the operators left that add up products, in an order that may depend on how many rows there are.

    An operator of another library, such as the experts of Transformers, may be one.
    """
    found = set[str]()
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "emssd_native":
            name = node.target._opname
            size = node.args[0].meta["val"].shape[-1] if name in _PLAIN_PRODUCTS else None
            is_one = isinstance(size, int) and size == 1  # as in rotary embeddings: nothing is added up
            if node.target.namespace != "aten" or (name in _PRODUCTS and not is_one):
                found.add(name)
    return sorted(found)


class NotKeptError(CompileError):
    """No earlier run has left a program of this module."""


class ProvenProgram(ABC):
    """The compiled program of one module, on a CPU.

    A program that is found on disk may be another module's or damaged. So it is compared with the module on a short
    pass, and compiled once more if it differs. The module must stay as it is, as the program reads its tensors. A
    module with code of no library has no key: its program is compiled for this process alone.

    Attributes:
        origin: in words, where the program comes from.

    Raises:
        NotKeptError: no earlier run has left one, and `only_kept` compiles nothing.
        CompileError: no C++ compiler, a cache that others can write, a module that cannot be traced, or a program that
            computes something else.
    """

    kind: str
    """The name of the folder of such programs."""

    def __init__(self, module: torch.nn.Module, *, only_kept: bool = False) -> None:
        self.origin = "just now, for later runs too"
        try:
            try:
                key: str | None = self.key()
            except UnnamedError as error:
                key, self.origin = None, f"just now, for this process alone: {error}"
            if only_kept and (key is None or not is_kept(self.kind, key)):  # before kernels are built
                raise NotKeptError("no program of it is kept")
            right = self.expected()

            def write(folder: Path) -> None:
                if only_kept:
                    raise NotKeptError("the program of it that is kept is damaged")
                self.compile(folder)

            declare_operators()
            found = self._entry(key, write)
            wrong = self._why_wrong(module, found, right)
            if wrong is not None and not found.new:
                logger.warning("%s is not the program of this model (%s), and is compiled again", found.folder, wrong)
                found = self._entry(key, write, replace=True)
                wrong = self._why_wrong(module, found, right)
            if wrong is not None:
                raise CompileError(
                    f"{found.folder} is not the program of this model, though it was just compiled: {wrong}"
                )
        except (NativeError, CacheError) as error:
            raise CompileError(str(error)) from error
        except EmssdError:
            raise
        except Exception as error:  # a module's own code may raise anything
            raise CompileError(f"{type(module).__name__} cannot be compiled: {described(error)}") from error
        self.folder, self._found = found.folder, found
        self.origin = self.origin if found.new else "its program was kept"

    def _entry(self, key: str | None, write: Callable[[Path], None], *, replace: bool = False) -> Entry:
        if key is not None:
            return entry(self.kind, key, write, replace=replace)
        self._scratch = TemporaryDirectory(prefix="emssd-program-")  # which goes with this
        folder = Path(self._scratch.name)
        write(folder)
        return Entry(folder, new=True)

    @abstractmethod
    def key(self) -> str:
        """A name for what the program depends on, see `emssd.model.compile.fingerprint`."""

    @abstractmethod
    def expected(self) -> Seq[torch.Tensor]:
        """The outputs of the module itself for a short pass."""

    @abstractmethod
    def compile(self, folder: Path) -> None:
        """Compile the module into `folder`."""

    @abstractmethod
    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        """The program's outputs for the short pass: names, values, and the standard deviations each may be off."""

    def _why_wrong(self, module: torch.nn.Module, found: Entry, right: Seq[torch.Tensor]) -> str | None:
        """Load what was found. Returns why it is not the program; reading something else raises almost anything."""
        vars(self).pop("_program", None)  # its weights go before there are others
        try:
            self._program = Program(found, module)
            for (name, value, most), wanted in zip(self.outputs(), right, strict=True):
                got, wanted = value.double(), wanted.double()
                far = float((got - wanted).abs().max() / wanted.std().clamp_min(1e-12))
                if not far <= most:  # also NaN
                    return f"its {name} differ by {far:.3g} standard deviations"
        except Exception as error:
            return described(error)
        return None


def sources(*files: str) -> list[str]:
    """The code of `files` and of what else makes programs."""
    return [Path(file).read_text() for file in (*files, __file__, loaded.__file__)]


def in_one_row(kept: torch.Tensor, batch: int, num_tokens: int) -> torch.Tensor:
    """The places ``[batch * m]`` of tokens to keep, ``[m]`` in each of `batch` rows, once rows are put together.

    A program takes one row of tokens. Only attention needs to know where rows begin.
    """
    starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
    return (starts + kept).flatten() if batch > 1 else kept
