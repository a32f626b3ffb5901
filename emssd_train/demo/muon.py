"""Muon: momentum whose update is made orthogonal; it learnt faster than AdamW in short trials here.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". PyTorch has one too, which
computes in bfloat16; that is many times slower on processors without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

__all__ = ["Muon", "orthogonalized"]

_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.01
# Jordan's quintic: five iterations bring every singular value to about one.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum.

    Args:
        params: weight matrices of hidden layers. Embeddings and vectors belong to another optimizer.
        lr: learning rate; the length of an update for a square matrix.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure is not supported
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for params in by_shape.values():  # one batched product for equal shapes
                updates = orthogonalized(torch.stack([self._direction(param) for param in params]))
                rows, columns = params[0].shape
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * _WEIGHT_DECAY).sub_(update, alpha=scale)

    def _direction(self, param: torch.nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state["mean"] = torch.zeros_like(param)
        mean: torch.Tensor = state["mean"].lerp_(param.grad, 1 - _MOMENTUM)
        return param.grad.lerp(mean, _MOMENTUM)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices ``[count, rows, columns]`` with all singular values near one, by Newton-Schulz steps."""
    a, b, c = _COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    result: torch.Tensor = matrices.mT if tall else matrices  # the products are smallest this way round
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.mT if tall else result
