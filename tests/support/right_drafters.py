"""Every drafter that can be made to agree with a target made by hand: `RIGHT`, and a `Trial` of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import emssd_early_exit
import emssd_heads.dflash
import emssd_heads.eagle
import emssd_heads.eagle3
import emssd_heads.hydra
import emssd_heads.kangaroo
import emssd_heads.medusa
import emssd_heads.mtp
from emssd_early_exit import EarlyExitConfig
from emssd_heads.dflash import DFlashConfig
from emssd_heads.eagle import EagleConfig
from emssd_heads.eagle3 import Eagle3Config
from emssd_heads.hydra import HydraConfig
from emssd_heads.kangaroo import KangarooConfig
from emssd_heads.medusa import MedusaConfig
from emssd_heads.mtp import MtpConfig
from emssd_heads.pard.drafter import PardDrafter
from emssd_ragged import Kernels, RaggedConfig

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Drafter, DrafterContext
from emssd.errors.ranges import check_options
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Batch, Generation
from tests.support.heads import Weights, new_folder, write_head
from tests.support.looking_back import BLOCK, DISTANCE, looking_back_model, write_looking_back_block
from tests.support.looking_back import VOCAB as SAID
from tests.support.perfect_head import perfect_target, write_perfect_eagle, write_perfect_eagle3, write_perfect_mtp
from tests.support.perfect_hydra import NUM_HEADS as NUM_HYDRA
from tests.support.perfect_hydra import write_perfect_hydra
from tests.support.perfect_medusa import NUM_HEADS as NUM_MEDUSA
from tests.support.perfect_medusa import lagging_target, write_perfect_medusa
from tests.support.right_drafts import PROMPTS, Load, Trial

MODEL_LEN, DEPTH, EXIT = 144, 4, 2
WIDE, MASK = SAID + 4, SAID + 2  # ids of a draft model that fills in masks
LONG_PROMPTS = [
    [1, 3, 4, 6, 0, 7, 8, 3],
    [6, 6, 1, 0, 8, 7, 4],
    [7, 8, 3, 1, 0, 4, 4, 6, 1, 7, 3],
    [0, 1, 2, 3, 4, 5, 6, 7, 8] * 2,
]
CHAIN: dict[str, Any] = {"tree": "chain"}
DYNAMIC: dict[str, Any] = {"tree": "dynamic", "num_nodes": 14, "top_k": 3}


@cache
def target() -> TargetModel:
    """Its next token depends on its last three, and its stream is another one after each of its three layers."""
    return TargetModel(perfect_target(MODEL_LEN))


@cache
def _lagging() -> TargetModel:
    return TargetModel(lagging_target(sharpness=8.0))  # its first choices are in every tree


@cache
def _looking_back(*sizes: int) -> TargetModel:
    return TargetModel(looking_back_model(*sizes, max_model_len=MODEL_LEN))


@cache
def perfect_path(write: Callable[..., str], *options: Any, **config: Any) -> str:
    """The folder of a perfect head of a kind."""
    return write(new_folder(), *options, **config)


@cache
def perfect_adapter() -> tuple[dict[str, Any], Weights]:
    """The last layer of a target whose MLPs do nothing, and its final norm."""
    model: Any = target().model
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    names = ["input_layernorm.weight", *(f"self_attn.{name}.weight" for name in attention)]
    state = model.state_dict()
    weights = {f"layers.0.{name}": state[f"model.layers.{EXIT}.{name}"] for name in names}
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("architectures", "dtype")}
    return config | {"num_hidden_layers": 1}, weights | {"norm.weight": state["model.norm.weight"]}


def _write_adapter(folder: Path) -> str:
    return write_head(folder, *perfect_adapter())


def loading(plugin: Any, config: type[Any], usual: Callable[[], Mapping[str, Any]], *, sure: bool = True) -> Load:
    """A builder of a plugin's drafter. `sure`: its trees have the likeliest token of every level, whatever else."""

    def load(options: Mapping[str, Any], context: DrafterContext) -> Drafter:
        (spec,) = plugin.emssd_drafters()
        chosen = config(**{**usual(), **options})
        check_options(chosen, "drafter")
        made: Any = spec.build(chosen, context)
        if sure:
            made.shape.temperature = 0.01
        return made

    return load


def noting(load: Load, drafts: list[tuple[list[int], list[int]]]) -> Load:
    """`load`, whose drafter notes the tokens of each row, and the chain that it drafts after them."""

    def loaded(options: Mapping[str, Any], context: DrafterContext) -> Drafter:
        made: Any = load(options, context)
        propose = made.propose

        def noted(batch: Batch, budget: Seq[int]) -> Draft:
            draft: Draft = propose(batch, budget)
            rows = draft.token_ids.split(draft.lengths)
            drafts.extend((list(row.tokens), chain.tolist()) for row, chain in zip(batch, rows, strict=True))
            return draft

        made.propose = noted
        return made  # type: ignore[no-any-return]

    return loaded


def _load_pard(options: Mapping[str, Any], context: DrafterContext) -> Drafter:
    assert context.cache_spec is not None
    assert context.make_cache is not None
    model = _looking_back(WIDE, MASK)
    spec = replace(
        model.kv_cache_spec(4), max_tokens=context.cache_spec.max_tokens, continuous=context.cache_spec.continuous
    )
    return PardDrafter(CausalLMRunner(model, context.make_cache(spec)), SAID, MASK, DISTANCE + 1)


class Right(NamedTuple):
    """A drafter that is always right.

    Attributes:
        load, target, prompts, waits: see `Trial`.
        shapes: options, and the depth of drafts that they give.
        roomy: the backend on which little memory holds few enough tokens.
    """

    load: Load
    shapes: Mapping[str, tuple[Mapping[str, Any], int]]
    target: Callable[[], TargetModel] = target
    prompts: Seq[Seq[int]] = PROMPTS
    waits: bool = True
    roomy: Any = "ragged"


_TREES = {"chain": (CHAIN, DEPTH), "static": ({"tree": "static"}, 5), "dynamic": (DYNAMIC, DEPTH)}


def _paired(plugin: Any, config: type[Any], write: Callable[..., str]) -> Right:
    return Right(loading(plugin, config, lambda: {"path": perfect_path(write), "depth": DEPTH}), _TREES)


def _hydra(prefix: bool) -> Right:
    load = loading(emssd_heads.hydra, HydraConfig, lambda: {"path": perfect_path(write_perfect_hydra, prefix=prefix)})
    shapes = {name: (options, NUM_HYDRA) for name, (options, _) in _TREES.items()}
    return Right(load, shapes)


def _medusa(vllm: bool) -> Right:
    path = lambda: {"path": perfect_path(write_perfect_medusa, 8.0, vllm=vllm)}  # noqa: E731
    shapes = {"chain": CHAIN, "static": {"tree": "static"}, "dynamic": {"tree": "dynamic", "num_nodes": 14}}
    return Right(
        loading(emssd_heads.medusa, MedusaConfig, path, sure=False),
        {name: (options, NUM_MEDUSA) for name, options in shapes.items()},
        _lagging,
        LONG_PROMPTS,
    )


_ONCE = {"chain": ({}, DEPTH)}
_FORESEEN = [[1, 3, 4, 6, 0, 7, 8, 3], [6, 1, 1, 5, 0, 2, 5], [7, 8, 2, 2, 6, 4, 4], [*range(9), 1, 3, 1]]
RIGHT: dict[str, Right] = {
    "eagle": _paired(emssd_heads.eagle, EagleConfig, write_perfect_eagle),
    "eagle3": _paired(emssd_heads.eagle3, Eagle3Config, write_perfect_eagle3),
    "mtp": _paired(emssd_heads.mtp, MtpConfig, write_perfect_mtp),
    "medusa": _medusa(vllm=False),
    "medusa-some": _medusa(vllm=True),
    "hydra": _hydra(prefix=True),
    "hydra-mlp": _hydra(prefix=False),
    "kangaroo": Right(
        loading(
            emssd_heads.kangaroo,
            KangarooConfig,
            lambda: {
                "path": perfect_path(_write_adapter),
                "num_layers": EXIT,
                "num_speculative_tokens": DEPTH,
                "min_confidence": 0.0,
            },
        ),
        _ONCE,
        waits=False,
    ),
    "early_exit": Right(
        loading(emssd_early_exit, EarlyExitConfig, lambda: {"num_layers": 3, "depth": DEPTH}),
        {"chain": (CHAIN, DEPTH), "dynamic": (DYNAMIC, DEPTH)},
        waits=False,
    ),
    "dflash": Right(
        loading(emssd_heads.dflash, DFlashConfig, lambda: {"path": perfect_path(write_looking_back_block)}, sure=False),
        {"chain": ({}, BLOCK - 1)},
        _looking_back,
        _FORESEEN,
        roomy=RaggedConfig(kernels=Kernels.torch),
    ),
    "pard": Right(
        _load_pard,
        {"chain": ({}, DISTANCE + 1)},
        _looking_back,
        _FORESEEN,
        waits=False,
        roomy=RaggedConfig(kernels=Kernels.torch),
    ),
}


def trial(name: str) -> Trial:
    """A new one of `RIGHT`."""
    right = RIGHT[name]
    depth = next(iter(right.shapes.values()))[1]
    return Trial(right.target(), depth, right.load, right.prompts, right.waits)


def decode(engine: Engine, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """See `Trial.decode`; with `target`, whatever drafts."""
    return replace(trial("eagle"), engine=engine).decode(kinds)
