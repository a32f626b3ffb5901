"""The time of a simulated step: `StepCurve`, fitted to measured steps or from first principles (`Roofline`)."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError
from emssd.metrics.least_squares import fit_non_negative
from emssd.metrics.stats import StageStats, StepStats

__all__ = ["FittedCurve", "Roofline", "StepCurve", "load_curve"]

_Array = npt.NDArray[np.float64]

_ROUNDS = 3  # of fits, each weighted by the one before
_SWEEPS = 1000  # of coordinate descent in each


class StepCurve(ABC):
    """Seconds of one step."""

    @abstractmethod
    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of a step without drafting; its rows have `num_kv_tokens` tokens of KV after it."""

    @abstractmethod
    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of drafting with the drafter of that stage: at most `depth` tokens a row, `num_tokens` in all."""


@dataclass(frozen=True, slots=True)
class Roofline(StepCurve):
    """A bound, not a measurement: bytes over bandwidth and operations over peak, whichever takes longer.

    The weights are read once a step, or computed with for as long as that takes, whichever is longer; then the KV is
    read. The arithmetic of attention, traffic of activations, and communication between devices are left out.

    Attributes:
        num_params: parameters that every token meets, each for one multiplication and one addition.
        kv_bytes_per_token: keys and values of one token in all layers.
        bandwidth: of the memory, in bytes/s.
        overhead: s that every pass takes beside.
        drafts: of each stage's draft model, one pass for each token of depth; ``None``, or no entry, for drafts that
            cost nothing.
    """

    num_params: float
    weight_bytes: float
    kv_bytes_per_token: float
    bandwidth: float
    flops: float
    overhead: float = 0.0
    drafts: tuple[Roofline | None, ...] = ()

    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        weights = max(self.weight_bytes / self.bandwidth, 2.0 * self.num_params * num_tokens / self.flops)
        return weights + self.kv_bytes_per_token * num_kv_tokens / self.bandwidth + self.overhead

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        draft = self.drafts[stage] if stage < len(self.drafts) else None
        return depth * draft.verify_seconds(-(-num_tokens // depth), num_kv_tokens) if draft and depth else 0.0


@dataclass(frozen=True, slots=True)
class FittedCurve(StepCurve):
    """Learnt from measured steps: piecewise linear in the tokens, linear in the KV; no coefficient is negative.

    Attributes:
        knots: numbers of tokens at which a further token may become dearer.
        verify: seconds per step, per token beyond each knot, and per token of KV.
        drafts: of each stage, seconds per drafting step, per token of depth, and per token.
    """

    knots: tuple[int, ...]
    verify: tuple[float, ...]
    drafts: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        lengths = [len(draft) for draft in self.drafts]
        if len(self.verify) != len(self.knots) + 2 or lengths != [3] * len(lengths):
            raise ConfigError(
                f"a curve of {len(self.knots)} knots has {len(self.knots) + 2} coefficients, and 3 for each drafter, "
                f"not {len(self.verify)} and {lengths}"
            )

    @classmethod
    def fit(cls, steps: Iterable[StepStats], knots: Seq[int] = (0, 16, 64, 256)) -> FittedCurve:
        """Least squares of relative errors. Steps of several batch sizes and budgets make it good for both."""
        steps = list(steps)
        if len(steps) < 10:
            raise ConfigError(f"a step-time curve is fitted to {len(steps)} steps; run at least 10")
        seconds = np.asarray([sum(step.seconds.values()) - step.seconds["draft"] for step in steps])
        features = np.asarray([_verify_features(step.num_tokens, step.num_kv_tokens, knots) for step in steps])
        stages = range(max(len(step.stages) for step in steps))
        drafts = tuple(_fit_draft([step.stages[i] for step in steps if any(step.stages[i].budget)]) for i in stages)
        return cls(tuple(knots), _least_squares(features, seconds), drafts)

    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        features = _verify_features(num_tokens, num_kv_tokens, self.knots)
        return sum(map(float.__mul__, self.verify, features))

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        per_step, per_level, per_token = self.drafts[stage] if stage < len(self.drafts) else (0.0, 0.0, 0.0)
        return per_step + per_level * depth + per_token * num_tokens if depth else 0.0

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def load_curve(path: Path) -> FittedCurve:
    """Read what `FittedCurve.save` wrote. Raises ConfigError: the file cannot be read, or holds something else."""
    try:
        return typed(read_json(path.read_bytes()), FittedCurve)
    except OSError as error:
        raise ConfigError(f"curve {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} holds no step-time curve ({error}); fit one with: python -m emssd.simulate record --curve FILE"
        ) from error


def _verify_features(num_tokens: int, num_kv_tokens: int, knots: Seq[int]) -> list[float]:
    return [1.0, *(float(max(0, num_tokens - knot)) for knot in knots), float(num_kv_tokens)]


def _fit_draft(stages: Seq[StageStats]) -> tuple[float, ...]:
    if not stages:
        return (0.0, 0.0, 0.0)
    features = np.asarray([[1.0, max(stage.budget), sum(stage.budget)] for stage in stages])
    return _least_squares(features, np.asarray([stage.seconds for stage in stages]))


def _least_squares(features: _Array, seconds: _Array) -> tuple[float, ...]:
    """Coefficients ``>= 0`` of the least relative errors.

    Errors are relative to the fit, not to the measurement, or else slow steps would count for too little.
    """
    scale = np.maximum(features.max(axis=0), 1e-300)
    solution, expected = [0.0] * features.shape[1], np.full(len(seconds), seconds.mean())
    for _ in range(_ROUNDS):
        rows = features / scale / expected[:, None]
        fit_non_negative((rows.T @ rows).tolist(), (rows.T @ (seconds / expected)).tolist(), solution, sweeps=_SWEEPS)
        expected = np.maximum(features / scale @ solution, 1e-3 * seconds.mean())
    return tuple((solution / scale).tolist())


# What dense kernels are assumed to reach of the data sheet's figures.
_BANDWIDTH_SHARE = 0.8
_FLOPS_SHARE = 0.6
_OVERHEAD = 0.5e-3  # s a pass: launches, the host, and what devices say to each other

# Memory bandwidth in bytes/s and dense bfloat16 arithmetic in FLOP/s, of the makers' data sheets (SXM versions).
_DEVICES = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12)}

# The shapes of the Llama 3 family: parameters, and bytes of KV per token: layers × 2 × KV heads × head size × 2 bytes.
_MODELS = {
    "llama-70b": (70.6e9, 80 * 2 * 8 * 128 * 2),
    "llama-8b": (8.0e9, 32 * 2 * 8 * 128 * 2),
    "llama-1b": (1.24e9, 16 * 2 * 8 * 64 * 2),
}


def roofline(model: str, device: str, num_devices: int = 1, *, draft_model: str | None = None) -> Roofline:
    """A model in bfloat16, divided evenly over devices, as is `draft_model`; without one, drafts cost nothing."""
    num_params, kv_bytes = _MODELS[model]
    bandwidth, flops = _DEVICES[device]
    curve = Roofline(
        num_params=num_params,
        weight_bytes=2.0 * num_params,
        kv_bytes_per_token=kv_bytes,
        bandwidth=num_devices * bandwidth * _BANDWIDTH_SHARE,
        flops=num_devices * flops * _FLOPS_SHARE,
        overhead=_OVERHEAD,
    )
    return dataclasses.replace(curve, drafts=(roofline(draft_model, device, num_devices),)) if draft_model else curve


PRESETS = {
    "70b-8xh100": roofline("llama-70b", "h100", 8),
    "70b-8xh100-draft-1b": roofline("llama-70b", "h100", 8, draft_model="llama-1b"),
    "70b-8xh200": roofline("llama-70b", "h200", 8),
    "70b-8xh200-draft-1b": roofline("llama-70b", "h200", 8, draft_model="llama-1b"),
    "8b-1xh100": roofline("llama-8b", "h100"),
}
