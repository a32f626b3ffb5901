"""The token that a PARD draft model was trained to fill in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emssd.errors import ConfigError

__all__ = ["config_of", "mask_token"]

_NAMES = ("pard_token", "ptd_token_id")  # of the authors, and what vLLM reads beside it


def config_of(path: str) -> Mapping[str, Any]:
    """The ``config.json`` of a model that was loaded from this folder or hub id."""
    from transformers import PretrainedConfig

    local = Path(path).expanduser()
    values: Mapping[str, Any] = PretrainedConfig.get_config_dict(str(local) if local.is_dir() else path)[0]
    return values


def mask_token(path: str, config: Mapping[str, Any], vocab_size: int, chosen: int | None = None) -> int:
    """The mask token of a draft model.

    Args:
        path: of the model, for messages.
        config: the values of its ``config.json``.
        vocab_size: of the draft model, which may be larger than the target's.

    Raises:
        ConfigError: there is none, or the model is one of PARD-2.
    """
    if config.get("spd_type") == "pard2" or any(name.startswith("pard2") for name in config):
        raise ConfigError(
            f"cannot draft with {path!r}: it is a PARD-2 model, which reads hidden states of its target, and "
            f"drafter=pard has none to give; take a PARD model"
        )
    named = {name: config[name] for name in _NAMES if config.get(name) is not None}
    if chosen is not None:
        what, token = f"drafter.mask_token_id is {chosen}", chosen
    elif named:
        name, token = next(iter(named.items()))
        what = f"{name} in its config.json is {token!r}"
    else:
        raise ConfigError(
            f"cannot draft with {path!r}: its config.json has no {_NAMES[0]}, so nothing says that it was trained to "
            f"draft in parallel; take drafter=draft_model, or give drafter.mask_token_id if you know it"
        )
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(f"cannot draft with {path!r}: {what}, and its vocabulary has the ids 0 to {vocab_size - 1}")
    return token
