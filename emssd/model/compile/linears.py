"""Linear layers in the graph of a program: those that read the same input are computed as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from emssd.model.compile.program import PREFIX

__all__ = ["join_products", "lay_together", "replace_by", "with_one_input"]


class Linear(NamedTuple):
    """A linear layer of a graph: its input, the name of its weight, and of its bias if it has one."""

    source: Any
    weight: str
    biases: tuple[str, ...]
    is_transposed: bool  # ``[in, out]``, as GPT-2 has it


def _linear_of(node: Any, parameters: Mapping[str, str]) -> Linear | None:
    """The linear layer that a `node` computes, if its tensors are all parameters; ``None`` if it computes none."""
    if node.target is torch.ops.aten.linear.default:
        source, weight, *biases = node.args
    elif node.target is torch.ops.aten.addmm.default and not node.kwargs:
        bias, source, weight = node.args
        biases = [bias]
    else:
        return None
    if any(tensor.name not in parameters for tensor in (weight, *biases)):
        return None
    name, *others = (parameters[tensor.name].removeprefix(PREFIX) for tensor in (weight, *biases))
    return Linear(source, name, tuple(others), node.target is torch.ops.aten.addmm.default)


def with_one_input(graph: torch.fx.Graph, parameters: Mapping[str, str]) -> list[list[tuple[Any, Linear]]]:
    """The linear layers of a graph, with their nodes: those together that read the same input in the same way."""
    together: dict[tuple[Any, bool, bool], list[tuple[Any, Linear]]] = {}
    for node in graph.nodes:
        if (linear := _linear_of(node, parameters)) is not None:
            key = linear.source, bool(linear.biases), linear.is_transposed
            together.setdefault(key, []).append((node, linear))
    return list(together.values())


def replace_by(nodes: Seq[Any], product: Any) -> None:
    """Put the parts of a `product`, which is the last node before the first of `nodes`, in the places of these."""
    graph, sizes = product.graph, [node.meta["val"].shape[-1] for node in nodes]
    product.meta["val"] = nodes[0].meta["val"].new_empty(*nodes[0].meta["val"].shape[:-1], sum(sizes))
    for node, size, stop in zip(nodes, sizes, accumulate(sizes), strict=True):
        part = product
        if len(nodes) > 1:
            part = graph.call_function(torch.ops.aten.slice.Tensor, (product, -1, stop - size, stop))
        part.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


def join_products(module: torch.fx.GraphModule) -> None:
    """Compute layers that read the same input as one, where their weights follow one another in memory."""
    graph, tensors = module.graph, dict(module.named_parameters(remove_duplicate=False))
    names = {node.name: str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target in tensors}
    for layers in with_one_input(graph, names):
        first, linear = layers[0]
        layers.sort(key=lambda layer: tensors[PREFIX + layer[1].weight].data_ptr())
        weights = [tensors[PREFIX + linear.weight] for _, linear in layers]
        biases = [tensors[PREFIX + bias] for _, linear in layers for bias in linear.biases]
        if len(layers) > 1 and not linear.is_transposed and _follow(weights) and _follow(biases):
            with graph.inserting_before(first):
                joined = [graph.get_attr(_joined(module, some)) for some in (weights, biases) if some]
                product = graph.call_function(torch.ops.aten.linear.default, (linear.source, *joined))
                replace_by([node for node, _ in layers], product)
    graph.eliminate_dead_code()
    module.recompile()


def _follow(tensors: Seq[torch.Tensor]) -> bool:
    """Whether they lie in one memory, each where the one before ends."""
    one = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < 2
    return one and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tensors))


def _joined(module: torch.fx.GraphModule, tensors: Seq[torch.Tensor]) -> str:
    """The name of a new buffer that is all of these tensors, which `_follow` one another."""
    name, size = f"joined{len(module._buffers)}", (sum(map(len, tensors)), *tensors[0].shape[1:])
    module.register_buffer(name, tensors[0].detach().as_strided(size, tensors[0].stride()), persistent=False)
    return name


def lay_together(model: nn.Module) -> None:
    """Lay the weights of linear layers side by side in memory that are of one module and take inputs of one size.

    They stay parameters of the model, as views. Those that are shared, quantized or have a class of their own are left.
    """
    uses = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    for module in model.modules():
        together: dict[Hashable, list[nn.Linear]] = {}
        for layer in module.children():
            if type(layer) is nn.Linear and all(
                type(p) is nn.Parameter and uses[id(p)] == 1 for p in layer.parameters()
            ):
                key = layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device
                together.setdefault(key, []).append(layer)
        for layers in together.values():
            for name in ("weight", "bias"):
                held = [tensor for layer in layers if (tensor := getattr(layer, name)) is not None]
                if len(held) > 1:
                    parts = torch.split_with_sizes(
                        torch.cat([tensor.detach() for tensor in held]), list(map(len, held))
                    )
                    for layer, tensor, part in zip(layers, held, parts, strict=True):
                        setattr(layer, name, nn.Parameter(part, tensor.requires_grad))
