"""Quantised weights: a folder is refused if Transformers cannot compute with its format here."""

from __future__ import annotations

from typing import Any

from emssd.data.model_folder import cannot_load
from emssd.errors.faults import described

__all__ = ["check_quantized"]


def check_quantized(path: str, config: Any, device_map: Any) -> None:
    """Refuse a format that needs another package or device, before any weights are read."""
    from transformers.quantizers.auto import AutoHfQuantizer

    parts = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    if (values := next(filter(None, parts), None)) is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(values.copy(), pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except Exception as error:  # each format has its own code, and values that anybody may have written
        raise cannot_load(
            path,
            f"its weights are quantised in the format {values.get('quant_method')}, which cannot be used here "
            f"({described(error).rstrip('.')}); give a dense folder of the model, or a .gguf file",
        ) from error
