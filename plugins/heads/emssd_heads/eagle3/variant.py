"""The differences between EAGLE-3 heads: flags of their configs, and the target's hidden states that they read.

Trainers number layers in two ways, and files do not say which.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from emssd.errors import ConfigError
from emssd_heads import LAST_NORMED, DecoderConfig, HeadFiles
from emssd_heads.eagle3 import LayerIds

__all__ = ["Variant", "aux_layers", "variant_of"]

logger = logging.getLogger("emssd")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of EAGLE-3 head.

    Attributes:
        num_features: hidden states of the target that make one feature; 0 for its last one as it is.
        norm_before_residual: the first layer adds to the normed feature, not to the feature.
        norm_before_fc: one norm over all hidden states before `fc`.
        fc_norm: a norm for each hidden state before `fc`.
        norm_output: the feature that is fed back is normed, once for itself and the logits.
        layers: the target's hidden states that it reads, see `emssd_heads.LAST_NORMED`.
        why: the reason for these, in words.
        mask_token_id: of a head that drafts in parallel (P-EAGLE), the token in the place of drafted ones.
    """

    decoder: DecoderConfig
    num_features: int
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float
    layers: tuple[int, ...]
    why: str
    mask_token_id: int | None


def variant_of(files: HeadFiles, meaning: LayerIds = LayerIds.auto) -> Variant:
    """Read the flags, at the top of the config or in its ``eagle_config``, and check the sizes against the target.

    The config's numbers of layers have this `meaning`.
    """
    names, target, config = files.names, files.target, files.config
    files.check_sizes(None, config.get("vocab_size"))
    container = config.get("speculators_model_type") is not None
    is_parallel = "mask_hidden" in names or config.get("speculators_model_type") == "peagle"
    inner = config.get("eagle_config") or {}

    def flag(name: str, default: Any = None) -> Any:
        return next((values[name] for values in (config, inner) if values.get(name) is not None), default)

    decoder, ids = DecoderConfig.read(config, files.checkpoint.path), flag("eagle_aux_hidden_state_layer_ids")
    num_features = _num_features(files) if flag("use_aux_hidden_state", True) else 0
    nested = not config.get("eagle_aux_hidden_state_layer_ids")
    ids = tuple(map(int, ids)) if ids else None
    layers, why = aux_layers(ids, num_features, target.num_layers, container=container, nested=nested, meaning=meaning)
    variant = Variant(
        decoder=decoder,
        num_features=num_features,
        draft_vocab_size=int(flag("draft_vocab_size", 32000 if container else None) or target.vocab_size),
        norm_before_residual=bool(flag("norm_before_residual", container and not is_parallel)),
        norm_before_fc=bool(flag("norm_before_fc", "input_norm.weight" in names)),
        fc_norm=bool(flag("fc_norm", "fc_norm.0.weight" in names)),
        norm_output=bool(flag("norm_output", False)),
        logit_scale=float(flag("logit_scale", 1.0)),
        layers=layers,
        why=why,
        mask_token_id=flag("mask_token_id", flag("pard_token")) if is_parallel else None,
    )
    _check(files, variant, flag("num_aux_hidden_states"), is_parallel=is_parallel)
    return variant


def _num_features(files: HeadFiles) -> int:
    if "fc.weight" not in files.names:
        return 3  # that fc is missing is said with all that is
    width, size = files.checkpoint.tensors[files.names["fc.weight"]].shape[-1], files.target.hidden_size
    if width % size:
        raise files.cannot(
            f"its fc reads {width} numbers, which is no multiple of the target's hidden size {size}; it was trained "
            f"for another target"
        )
    return width // size


def _check(files: HeadFiles, variant: Variant, num_states: int | None, *, is_parallel: bool) -> None:
    mask: object = variant.mask_token_id
    target, size, trained_for = files.target, variant.decoder.hidden_size, files.config.get("target_hidden_size")
    borrowed = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in files.names]
    if trained_for not in (None, target.hidden_size):
        why = f"it was trained for a hidden size of {trained_for}, and the target's is {target.hidden_size}"
    elif size != target.hidden_size and (borrowed or not variant.num_features):
        what = "last hidden state" if not borrowed else " and ".join(borrowed)
        why = f"it has a hidden size of {size}, and would use the target's {what}, of size {target.hidden_size}"
    elif is_parallel and (type(mask) is not int or not 0 <= mask < target.vocab_size):
        why = (
            f"it drafts in parallel, and its mask_token_id is {mask}; that must be a token of the target's, below "
            f"{target.vocab_size}"
        )
    elif variant.norm_before_fc and variant.fc_norm:
        why = "its config sets both norm_before_fc and fc_norm, and a head has one of them at most"
    elif variant.num_features and num_states is not None and num_states != variant.num_features:
        why = f"its config has num_aux_hidden_states {num_states}, and its fc reads {variant.num_features}"
    else:
        return
    raise files.cannot(why)


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
