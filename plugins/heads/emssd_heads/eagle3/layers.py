"""The hidden states that an EAGLE-3 head reads. Trainers number layers in two ways, and files do not say which."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from emssd.errors import ConfigError
from emssd_heads import LAST_NORMED
from emssd_heads.eagle3 import LayerIds

__all__ = ["AuxLayers", "aux_layers"]

logger = logging.getLogger("emssd")


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """The target's hidden states that a head reads.

    Attributes:
        layers: their numbers, see `emssd_heads.LAST_NORMED`, in the order in which the head reads them.
        why: the reason, in words.
    """

    layers: tuple[int, ...]
    why: str


def aux_layers(
    ids: tuple[int, ...] | None,
    num_features: int,
    num_layers: int,
    *,
    container: bool = False,
    nested: bool = False,
    meaning: LayerIds = LayerIds.auto,
) -> AuxLayers:
    """The `num_features` hidden states that a head reads, by the `ids` of its config; 0 for the last one as it is.

    Args:
        container: whether the config is one of ``speculators``.
        nested: whether the numbers stand in ``eagle_config``, as those of SGLang and SpecForge do.
    """
    if not num_features:
        return AuxLayers((LAST_NORMED,), "use_aux_hidden_state is false")
    if ids is None:
        chosen = AuxLayers((2, num_layers // 2, num_layers - 3), "the default, as the config names none")
    elif meaning is not LayerIds.auto:
        chosen = AuxLayers(_streams(ids, meaning), f"layer_ids={meaning.value}")
    elif container:
        chosen = AuxLayers(ids, "as speculators numbers them")
    elif max(ids) == num_layers:
        chosen = AuxLayers(ids, "as the last one is the number of the target's layers")
    elif ids[0] == 1:
        chosen = AuxLayers(_streams(ids, LayerIds.output), "outputs of layers, as the first is 1")
    else:
        likely, other = (LayerIds.output, LayerIds.hs) if nested else (LayerIds.hs, LayerIds.output)
        chosen = AuxLayers(_streams(ids, likely), f"a guess from the config: layer_ids={likely.value}")
        logger.warning(
            "drafter=eagle3: the head's config leaves open which hidden states it reads; drafter.layer_ids=%s is "
            "likelier. If hardly anything is accepted, set %s",
            likely.value,
            other.value,
        )
    if len(chosen.layers) != num_features:
        raise ConfigError(
            f"the head reads {num_features} hidden states of the target, and its config names {len(chosen.layers)}"
            + ("" if ids else " by default")
        )
    if not all(0 <= layer <= num_layers for layer in chosen.layers):
        raise ConfigError(
            f"the head reads the target's hidden states {_listed(chosen.layers)}, and a target of {num_layers} layers "
            f"has 0 to {num_layers}"
        )
    if len(set(chosen.layers)) < len(chosen.layers):
        raise ConfigError(
            f"the head reads the target's hidden states {_listed(chosen.layers)}, and needs different ones"
        )
    return chosen


def _streams(ids: tuple[int, ...], meaning: LayerIds) -> tuple[int, ...]:
    return tuple(each + 1 for each in ids) if meaning is LayerIds.output else ids


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
