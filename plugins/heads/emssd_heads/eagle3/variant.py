"""The differences between EAGLE-3 heads: the flags of their configs, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emssd_heads import DecoderConfig, HeadFiles
from emssd_heads.eagle3 import LayerIds
from emssd_heads.eagle3.layers import aux_layers

__all__ = ["Variant", "variant_of"]


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
        mask_token_id=_mask_token_id(files, flag("mask_token_id", flag("pard_token"))) if is_parallel else None,
    )
    _check(files, variant, flag("num_aux_hidden_states"))
    return variant


def _mask_token_id(files: HeadFiles, token: Any) -> int:
    if type(token) is not int or not 0 <= token < files.target.vocab_size:
        raise files.cannot(
            f"it drafts in parallel, and its mask_token_id is {token}; that must be a token of the target's, below "
            f"{files.target.vocab_size}"
        )
    return token


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


def _check(files: HeadFiles, variant: Variant, num_states: int | None) -> None:
    target, size, trained_for = files.target, variant.decoder.hidden_size, files.config.get("target_hidden_size")
    borrowed = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in files.names]
    files.check_sizes(None, files.config.get("vocab_size"))
    if trained_for not in (None, target.hidden_size):
        why = f"it was trained for a hidden size of {trained_for}, and the target's is {target.hidden_size}"
    elif size != target.hidden_size and (borrowed or not variant.num_features):
        what = "last hidden state" if not borrowed else " and ".join(borrowed)
        why = f"it has a hidden size of {size}, and would use the target's {what}, of size {target.hidden_size}"
    elif variant.norm_before_fc and variant.fc_norm:
        why = "its config sets both norm_before_fc and fc_norm, and a head has one of them at most"
    elif variant.num_features and num_states is not None and num_states != variant.num_features:
        why = f"its config has num_aux_hidden_states {num_states}, and its fc reads {variant.num_features}"
    else:
        return
    raise files.cannot(why)
