"""Roofline curves of models and devices that may not be here. None of these is a measurement."""

from __future__ import annotations

import dataclasses

from emssd.simulate.curves import Roofline

__all__ = ["PRESETS", "roofline"]

# What dense kernels are assumed to reach of the data sheet's figures.
_BANDWIDTH_SHARE = 0.8
_FLOPS_SHARE = 0.6
_OVERHEAD = 0.5e-3  # s a pass: launches, the host, and what devices say to each other

# Memory bandwidth in bytes/s and dense bfloat16 arithmetic in FLOP/s, of the makers' data sheets (SXM versions).
_DEVICES = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12)}

# Parameters, and bytes of KV per token: layers × 2 × KV heads × head size × 2 bytes.
_MODELS = {
    "llama-70b": (70.6e9, 80 * 2 * 8 * 128 * 2),
    "llama-8b": (8.0e9, 32 * 2 * 8 * 128 * 2),
    "llama-1b": (1.24e9, 16 * 2 * 8 * 64 * 2),
}


def roofline(model: str, device: str, num_devices: int = 1, *, draft_model: str | None = None) -> Roofline:
    """A model in bfloat16, divided evenly over devices.

    Args:
        model: ``llama-70b``, ``llama-8b`` or ``llama-1b``: the shapes of the Llama 3 family.
        device: ``h100`` or ``h200``.
        draft_model: which model drafts, on the same devices; ``None`` for drafts that cost nothing, as retrieval.
    """
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
