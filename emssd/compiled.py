"""`model.compile` on a CPU: the model's forward pass as one compiled program, kept on disk for later runs.

Transformers' own forward is traced once by `torch.export`, with attention as an opaque operator and with linear layers
that share their input joined into one; Inductor compiles the rest ahead of time. The number of tokens stays free.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import LayerSpec
from emssd.errors import EmssdError
from emssd.native import NativeError, cache_dir, kernels_key, load_kernels

if TYPE_CHECKING:
    from emssd.model import Attend, TargetModel

__all__ = ["CompileError", "CompiledForward"]

_PROGRAM, _LINEARS, _CONSTANTS = "program.pt2", "linears.json", "constants.pt"
_PREFIX = "model."  # of the model's own names in the program
_MAX_TOKENS = 1 << 20  # of one step

logger = logging.getLogger("emssd")


class CompileError(EmssdError):
    """The model cannot be compiled here; the message says why."""


class CompiledForward:
    """The compiled forward pass of one model.

    Args:
        target: the model, on a CPU. It is left as it was; its linear weights are copied in the layout of their kernel,
            so that changing them later has no effect here.

    Raises:
        CompileError: another device, no C++ compiler, or a model that cannot be traced.
    """

    def __init__(self, target: TargetModel) -> None:
        if target.device.type != "cpu":
            raise CompileError(f"model.compile is for CPUs, and the model is on {target.device}")
        try:
            self._kernels = load_kernels()
        except NativeError as error:
            raise CompileError(str(error)) from error
        _declare_linear()
        self._layers = target.layers
        self._attend: Attend | None = None
        self._weights: torch.Tensor = self._kernels.new_weights()
        weakref.finalize(self, self._kernels.free_weights, self._weights)
        _FORWARDS[int(self._weights)] = self
        folder = cache_dir() / "models" / _fingerprint(target)
        if not folder.exists():
            _compile(target, self._weights, folder)
        try:
            self._load(target.model, folder)
        except Exception as error:  # reading what was not written to its end raises almost anything
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise CompileError(f"{folder} cannot be loaded ({reason}); delete it, and it is compiled again") from error

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        logits_to_keep: torch.Tensor,
    ) -> torch.Tensor:
        """Like `TargetModel.run`: ``[b, n]`` tokens in, logits ``[b, m, vocab]`` out."""
        batch, num_tokens = input_ids.shape
        if batch > 1:  # the program takes one row of tokens, and only `attend` knows where rows begin
            starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
            logits_to_keep = (starts + logits_to_keep).flatten()
        num_logits, self._num_tokens = logits_to_keep.numel(), batch * num_tokens
        inputs = [input_ids.view(1, -1), position_ids.view(1, -1), logits_to_keep]
        if self._few_sizes:
            inputs = [_filled(each) for each in inputs]
        self._attend = attend
        try:
            (logits,) = self._run([*inputs, self._weights])
        finally:
            self._attend = None
        return logits[:, :num_logits].view(batch, -1, logits.shape[-1])

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What the program calls in the place of attention."""
        assert self._attend is not None, "attention outside of a step"
        count, spec = self._num_tokens, self._layers[layer]
        if query.shape[0] == count:
            return self._attend(layer, spec, query, key, value)
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        out[:count] = self._attend(layer, spec, query[:count], key[:count], value[:count])
        return out

    def _load(self, model: torch.nn.Module, folder: Path) -> None:
        """The program in `folder`, with the weights of `model`."""
        tensors = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        self._few_sizes = False  # whether linear layers are slow at sizes that they did not meet before
        for linear in json.loads((folder / _LINEARS).read_text()):
            biases = [tensors[name].detach() for name in linear["biases"]]
            weight = torch.cat([tensors[name].detach() for name in linear["weights"]])
            bias = torch.cat(biases) if biases else None
            self._few_sizes |= self._kernels.add_weight(self._weights, weight, bias)
        program = torch._inductor.aoti_load_package(str(folder / _PROGRAM), run_single_threaded=True)
        known = {_PREFIX + name: tensor.detach() for name, tensor in tensors.items()}
        known |= torch.load(folder / _CONSTANTS)
        self._constants = {name: known[name] for name in program.get_constant_fqns()}  # not copied: they must stay
        program.load_constants(self._constants, check_full_update=True, user_managed=True)
        self._run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = program.loader.boxed_run


def _filled(values: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` integers, with zeros up to one of few sizes: oneDNN makes a program for each size that it meets."""
    size = values.shape[-1]
    step = 1 if size <= 8 else 4 if size <= 128 else 32
    return torch.nn.functional.pad(values, (0, -size % step)) if size % step else values


_FORWARDS: weakref.WeakValueDictionary[int, CompiledForward] = weakref.WeakValueDictionary()

_library: Any = torch.library.Library("emssd", "DEF")  # type: ignore[no-untyped-call]  # it has no annotations
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor")


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, layer: int
) -> torch.Tensor:
    out = _FORWARDS[handle.item()].attend(layer, query, key, value)  # type: ignore[index]  # an int64
    return out.contiguous()  # as the program takes it to be, and does not check


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, layer: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_library.impl("attend", _attend, "CPU")
torch.library.register_fake("emssd::attend", _attend_shape, lib=_library)


def _linear_shape(source: torch.Tensor, handle: torch.Tensor, index: int, out_features: int) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], out_features)


@cache
def _declare_linear() -> None:
    """Tell the compiler the shape of a linear layer; its operator is there once the kernels are loaded."""
    torch.library.register_fake("emssd_native::linear", _linear_shape)


class _Traced(torch.nn.Module):
    """What is exported: one step, with attention as an operator."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.model = target.model
        self._target = target

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, handle: torch.Tensor
    ) -> torch.Tensor:
        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self._target.layers[layer]:
                raise CompileError(f"layer {layer} attends by {seen}, and by {self._target.layers[layer]} before")
            out: torch.Tensor = torch.ops.emssd.attend(query, key, value, handle, layer)
            return out

        return self._target.run(input_ids, position_ids, attend, logits_to_keep)


def _compile(target: TargetModel, handle: torch.Tensor, folder: Path) -> None:
    """Trace and compile `target` into `folder`, which appears when all of it is there."""
    name = type(target.model).__name__
    logger.info("compiling the forward pass of %s, once; this takes about %d s …", name, 10 + 2 * len(target.layers))
    tokens = torch.arange(24) % target.vocab_size
    inputs = (tokens.unsqueeze(0), torch.arange(24).unsqueeze(0), torch.arange(20), handle)
    num_tokens, num_kept = (torch.export.Dim(each, max=_MAX_TOKENS) for each in ("num_tokens", "num_kept"))
    scratch = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about its own code
            shapes = ({1: num_tokens}, {1: num_tokens}, {0: num_kept}, None)
            program = torch.export.export(_Traced(target), inputs, dynamic_shapes=shapes, strict=False)
            linears = _replace_linears(program) if _has_kernel(target.dtype) else []
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / _LINEARS).write_text(json.dumps(linears, indent=1))
            torch.save(dict(program.constants), scratch / _CONSTANTS)
            options = {"aot_inductor.package_constants_in_so": False}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(scratch / _PROGRAM), inductor_configs=options
            )
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(scratch, folder)
    except Exception as error:  # tracing and compiling raise almost anything
        raise CompileError(f"{name} cannot be compiled: {type(error).__name__}: {_first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether oneDNN has linear layers of this type on this machine; others are compiled with the rest."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # it has no annotations
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


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
        names = [[parameters[each.name].removeprefix(_PREFIX) for each in node.args[1:]] for node in nodes]
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


def _fingerprint(target: TargetModel) -> str:
    """What the program depends on: the model's code and shapes, not its weights; versions, machine and threads."""
    import transformers

    model = target.model
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    try:
        sources = [Path(__file__), Path(inspect.getfile(type(model)))]
    except (TypeError, OSError) as error:
        name = type(model).__name__
        raise CompileError(f"{name} is not defined in a file, so its code cannot be recognised") from error
    parts = [
        type(model).__qualname__,
        model.config.to_json_string(),
        str(target.layers),
        str(shapes),
        str(model.training),
        transformers.__version__,
        str(torch.get_num_threads()),
        kernels_key(),
        *(path.read_text() for path in sources),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
