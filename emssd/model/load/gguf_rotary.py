"""The scaling of rotary frequencies in a GGUF file, which Transformers does not read."""

from __future__ import annotations

from typing import Any

import numpy as np

from emssd.errors import ConfigError
from emssd.model.load.gguf_header import Header

__all__ = ["DIVISORS", "set_rotary"]

DIVISORS = "rope_freqs.weight"
"""A tensor that divides the frequencies; llama.cpp's converter writes it for Llama 3."""
_LINEAR = {"factor": "factor"}
_KINDS = {"linear": _LINEAR, "yarn": _LINEAR | {"original_context_length": "original_max_position_embeddings"}}
_TOLERANCE = 1e-5  # relative, of what a converter computed in float32


def set_rotary(config: Any, header: Header, divisors: np.ndarray | None) -> None:
    """Give `config` the scaling of a file's metadata, or the one with these `divisors` ``[head_dim / 2]``.

    Raises ConfigError: it is neither linear, nor YaRN, nor Llama 3's.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # the layers that are scaled
    if rope.get("rope_type") != "default":
        return  # there is none, or Transformers knows it
    values = {key.partition(".rope.scaling.")[2]: value for key, value in header.values.items()}
    if (kind := values.get("type", "linear" if "factor" in values else "none")) != "none":
        names, others = _KINDS.get(kind, {}), values.keys() - {"", "type", "finetuned"}
        if not names.keys() <= others <= _KINDS["yarn"].keys() or not names:
            raise _unknown(f"is {kind} by {', '.join(sorted(others))}")
        rope |= {"rope_type": kind} | {name: values[key] for key, name in names.items()}
    elif divisors is not None:
        rope |= _llama3(divisors.astype(np.float64), rope["rope_theta"])


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any]:
    """Llama 3's scaling of the frequencies of `theta` that divides by these.

    It divides slow waves by `factor`. The share of a frequency that is not divided grows with the turns per token:
    ``(original * turns - low) / (high - low)``, from 0 to 1. Their ratios count, so `low` is 1, as in Llama 3.
    """
    factor = float(divisors.max())
    turns = theta ** -(np.arange(len(divisors)) / len(divisors)) / (2 * np.pi)
    share = (1 / divisors - 1 / factor) / max(1 - 1 / factor, _TOLERANCE)
    between = (share > _TOLERANCE) & (share < 1 - _TOLERANCE)
    if between.sum() > 1:
        slope, start = np.polyfit(turns[between], share[between], 1)
        high, original = round(float(1 - 1 / start), 3), round(float(-slope / start))
        share = np.clip((original * turns - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - share) / factor + share), divisors, rtol=_TOLERANCE):
            sizes = {"original_max_position_embeddings": original, "low_freq_factor": 1.0, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor} | sizes
    raise _unknown(f"has other divisors ({DIVISORS}) than Llama 3's")


def _unknown(scaling: str) -> ConfigError:
    return ConfigError(f"the rotary scaling of the GGUF file {scaling}; emssd reads linear, YaRN and that of Llama 3")
