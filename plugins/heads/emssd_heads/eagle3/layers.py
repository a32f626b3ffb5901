"""The hidden states that an EAGLE-3 head reads. Trainers number layers in two ways, and files do not say which."""

from __future__ import annotations

import logging

from emssd.errors import ConfigError
from emssd_heads import LAST_NORMED
from emssd_heads.eagle3 import LayerIds

__all__ = ["aux_layers"]

logger = logging.getLogger("emssd")


def aux_layers(
    ids: tuple[int, ...] | None,
    num_features: int,
    num_layers: int,
    *,
    container: bool = False,
    nested: bool = False,
    meaning: LayerIds = LayerIds.auto,
) -> tuple[tuple[int, ...], str]:
    """The hidden states that a head reads, in its order, by the `ids` of its config; and the reason, in words.

    Args:
        num_features: hidden states that its weights take; 0 for the last one as it is.
        num_layers: of the target.
        container: whether the config is one of ``speculators``.
        nested: whether the numbers stand in ``eagle_config``, as those of SGLang and SpecForge do.
        meaning: of the numbers, as the user says it.
    """
    if not num_features:
        return (LAST_NORMED,), "use_aux_hidden_state is false"
    layers: tuple[int, ...]
    if ids is None:
        layers, why = (2, num_layers // 2, num_layers - 3), "the default, as the config names none"
    elif meaning is not LayerIds.auto:
        layers, why = _streams(ids, meaning), f"layer_ids={meaning.value}"
    elif container:
        layers, why = ids, "as speculators numbers them"
    elif max(ids) == num_layers:
        layers, why = ids, "as the last one is the number of the target's layers"
    elif ids[0] == 1:
        layers, why = _streams(ids, LayerIds.output), "outputs of layers, as the first is 1"
    else:
        likely, other = (LayerIds.output, LayerIds.hs) if nested else (LayerIds.hs, LayerIds.output)
        layers, why = _streams(ids, likely), f"a guess from the config: layer_ids={likely.value}"
        logger.warning(
            "drafter=eagle3: the head's config leaves open which hidden states it reads; drafter.layer_ids=%s is "
            "likelier. If hardly anything is accepted, set %s",
            likely.value,
            other.value,
        )
    if len(layers) != num_features:
        raise ConfigError(
            f"the head reads {num_features} hidden states of the target, and its config names {len(layers)}"
            + ("" if ids else " by default")
        )
    reads = f"the head reads the target's hidden states {', '.join(map(str, layers))}, and"
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(f"{reads} a target of {num_layers} layers has 0 to {num_layers}")
    if len(set(layers)) < len(layers):
        raise ConfigError(f"{reads} needs different ones")
    return layers, why


def _streams(ids: tuple[int, ...], meaning: LayerIds) -> tuple[int, ...]:
    return tuple(number + 1 for number in ids) if meaning is LayerIds.output else ids
