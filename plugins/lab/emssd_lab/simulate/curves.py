"""The time of a simulated step, from first principles."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRESETS", "Roofline"]


@dataclass(frozen=True, slots=True)
class Roofline:
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
        """Seconds of a step without drafting; its rows have `num_kv_tokens` tokens of KV after it."""
        weights = max(self.weight_bytes / self.bandwidth, 2.0 * self.num_params * num_tokens / self.flops)
        return weights + self.kv_bytes_per_token * num_kv_tokens / self.bandwidth + self.overhead

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of drafting with the drafter of that stage: at most `depth` tokens a row, `num_tokens` in all."""
        draft = self.drafts[stage] if stage < len(self.drafts) else None
        return depth * draft.verify_seconds(-(-num_tokens // depth), num_kv_tokens) if draft and depth else 0.0


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
    bandwidth, flops = (num_devices * rate for rate in _DEVICES[device])
    drafts = (roofline(draft_model, device, num_devices),) if draft_model else ()
    return Roofline(
        num_params, 2.0 * num_params, kv_bytes, bandwidth * _BANDWIDTH_SHARE, flops * _FLOPS_SHARE, _OVERHEAD, drafts
    )


PRESETS = {
    "70b-8xh100": roofline("llama-70b", "h100", 8),
    "70b-8xh100-draft-1b": roofline("llama-70b", "h100", 8, draft_model="llama-1b"),
    "70b-8xh200": roofline("llama-70b", "h200", 8),
    "70b-8xh200-draft-1b": roofline("llama-70b", "h200", 8, draft_model="llama-1b"),
    "8b-1xh100": roofline("llama-8b", "h100"),
}
