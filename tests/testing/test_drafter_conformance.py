"""All first-party drafters pass the suite that strangers' drafters are held to."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import emssd_early_exit
import emssd_kangaroo
import pytest
import torch
from emssd_dflash import DFlashConfig
from emssd_dflash.drafter import DFlashDrafter
from emssd_eagle import EagleConfig
from emssd_eagle.drafter import load_drafter as load_eagle
from emssd_eagle3 import Eagle3Config, LayerIds
from emssd_eagle3.drafter import load_drafter as load_eagle3
from emssd_early_exit import EarlyExitConfig
from emssd_hydra import HydraConfig
from emssd_hydra.drafter import HydraDrafter
from emssd_kangaroo import KangarooConfig
from emssd_medusa import MedusaConfig
from emssd_medusa.drafter import MedusaDrafter
from emssd_mtp import MtpConfig
from emssd_mtp.drafter import load_drafter as load_mtp
from emssd_pard.drafter import PardDrafter
from emssd_rest import RestConfig
from emssd_rest.build import build_store
from emssd_rest.drafter import RestDrafter
from emssd_union.drafter import UnionDrafter

from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.heads.options import TreeKind
from emssd.testing import DrafterConformance
from tests.support.heads import layer_weights, random_weights, write_head

pytestmark = pytest.mark.costly("holds a plugin to every rule")


class TestNone(DrafterConformance):
    plugin = "none"


class TestLLMA(DrafterConformance):
    plugin = "llma"
    options = {"match_length": 1, "search": "prompt_and_output", "require_full_copy": False}  # noqa: RUF012


class TestLLMATree(DrafterConformance):
    plugin = "llma"
    options = TestLLMA.options | {"branches": 3, "copy_length": 4}


class TestDraftModel(DrafterConformance):
    plugin = "draft_model"
    num_examples = 2  # a model in the loop takes its time


class TestSelf(DrafterConformance):
    """Without an engine there is no KV cache to share, and nothing is drafted; plugins/self_draft/tests has engines."""

    plugin = "self"
    num_examples = 2


class TestDraftModelStatic(DrafterConformance):
    plugin = "draft_model"
    num_examples = 2
    options = {"tree": "static", "expansion": [2, 1, 2]}  # noqa: RUF012


class TestDraftModelDynamic(DrafterConformance):
    plugin = "draft_model"
    num_examples = 2
    options = {"tree": "dynamic", "num_nodes": 7, "depth": 3, "top_k": 3}  # noqa: RUF012


class TestDraftModelSequoia(DrafterConformance):
    plugin = "draft_model"
    num_examples = 2
    options = {"tree": "sequoia", "num_nodes": 7, "depth": 3, "top_k": 3}  # noqa: RUF012
    learns_across_requests = True


class TestEarlyExit(DrafterConformance):
    num_examples = 2
    config = EarlyExitConfig
    options = {"depth": 3, "min_confidence": 0.3}  # noqa: RUF012

    def make_drafter(self, context: DrafterContext) -> Drafter:
        (spec,) = emssd_early_exit.emssd_drafters()
        drafter: Drafter = spec.build(self.make_config(), context)
        return drafter


class TestEarlyExitTree(TestEarlyExit):
    options = {"tree": "dynamic", "num_nodes": 7, "depth": 3, "top_k": 3}  # noqa: RUF012


class TestKangaroo(DrafterConformance):
    """An adapter of random weights, of which little is accepted."""

    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        assert context.target is not None
        path = _random_adapter(context.target.hidden_size)
        config = KangarooConfig(path=path, num_layers=1, num_speculative_tokens=3, min_confidence=0.2)
        (spec,) = emssd_kangaroo.emssd_drafters()
        drafter: Drafter = spec.build(config, context)
        return drafter


class TestEagle(DrafterConformance):
    """A head of random weights, of which little is accepted."""

    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return load_eagle(EagleConfig(path=_random_head(context, "eagle"), tree=TreeKind.static), context)


class TestEagle3(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        path = _random_head(context, "eagle3")
        return load_eagle3(Eagle3Config(path, num_nodes=7, depth=3, top_k=3, layer_ids=LayerIds.hs), context)


class TestEagle3Chain(DrafterConformance):
    """It measures first how its head is meant, so it drafts otherwise beside other requests."""

    num_examples = 2
    learns_across_requests = True

    def make_drafter(self, context: DrafterContext) -> Drafter:
        path = _random_head(context, "eagle3")
        return load_eagle3(Eagle3Config(path, tree=TreeKind.chain, depth=3), context)


class TestDFlash(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        assert context.target is not None
        path = _written_block_head(context.target.hidden_size, context.vocab_size)
        return DFlashDrafter.load(DFlashConfig(path=path), context)


class TestMtp(DrafterConformance):
    """A layer of random weights, of which little is accepted."""

    num_examples = 2
    models = ("llama",)  # whose layers have rotary positions

    def make_drafter(self, context: DrafterContext) -> Drafter:
        assert context.target is not None
        values = context.target.config
        config = {**{name: values[name] for name in _SIZES}, "vocab_size": context.vocab_size}
        return load_mtp(MtpConfig(path=_written_layer(tuple(config.items()), context.target.num_layers)), context)


class TestPard(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return PardDrafter(context.load_runner("any")[0], context.vocab_size, 0, 4)


class TestCascade(DrafterConformance):
    plugin = "cascade"
    num_examples = 2
    options = {"options": {"llma": {"match_length": 1, "copy_length": 3}}}  # noqa: RUF012


class TestPLD(DrafterConformance):
    plugin = "pld"
    options = {"max_ngram_size": 2, "num_speculative_tokens": 3, "require_full_copy": False}  # noqa: RUF012


class TestPLDTree(DrafterConformance):
    plugin = "pld"
    options = TestPLD.options | {"branches": 2, "occurrence": "last"}


class TestSuffix(DrafterConformance):
    plugin = "suffix"


class TestSuffixTree(DrafterConformance):
    plugin = "suffix"
    options = {"branches": 3, "num_speculative_tokens": 4, "max_spec_factor": 2.0}  # noqa: RUF012


class TestSuffixWithCache(DrafterConformance):
    plugin = "suffix"
    options = {"cache_tokens": 200, "cache_bias": 0}  # noqa: RUF012
    learns_across_requests = True


class TestLookahead(DrafterConformance):
    plugin = "lookahead"
    options = {"window": 3, "ngram": 3, "guesses": 2}  # noqa: RUF012


class TestANPD(DrafterConformance):
    plugin = "anpd"


class TestNGrammys(DrafterConformance):
    plugin = "ngrammys"
    options = {"num_candidates": 3, "num_nodes": 6}  # noqa: RUF012
    learns_across_requests = True


class TestTokenRecycling(DrafterConformance):
    plugin = "token_recycling"
    options = {"num_candidates": 3, "num_nodes": 6}  # noqa: RUF012
    learns_across_requests = True


class TestRest(DrafterConformance):
    def make_drafter(self, context: DrafterContext) -> Drafter:
        return RestDrafter.load(RestConfig(store=_store(context.vocab_size), min_match=1), context)


class TestRestTree(DrafterConformance):
    def make_drafter(self, context: DrafterContext) -> Drafter:
        config = RestConfig(store=_store(context.vocab_size), min_match=1, branches=4, num_speculative_tokens=4)
        return RestDrafter.load(config, context)


class TestUnion(DrafterConformance):
    plugin = "union"
    options = {  # noqa: RUF012
        "drafters": ["llma", "suffix"],
        "options": {"llma": {"match_length": 1, "copy_length": 3}, "suffix": {"branches": 2}},
    }


class TestHiddenStates(DrafterConformance):
    """The drafter on the page about hidden states."""

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return similar_places()


class TestHiddenStatesWithinAUnion(DrafterConformance):
    def make_drafter(self, context: DrafterContext) -> Drafter:
        found = context.make_drafter("llma", {"match_length": 1, "copy_length": 3})
        both = [CheckedDrafter(each, None, context.vocab_size, on_error="fail") for each in (similar_places(), found)]
        return UnionDrafter(both)


class TestUnionWithADraftModel(DrafterConformance):
    plugin = "union"
    num_examples = 2


class TestMedusa(DrafterConformance):
    """Heads of random weights, as below."""

    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return MedusaDrafter.load(MedusaConfig(path=_random_medusa(context), num_nodes=7), context)


class TestHydra(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return HydraDrafter.load(HydraConfig(path=_random_hydra(context), num_nodes=7, top_k=3), context)


def _random_medusa(context: DrafterContext) -> str:
    """Three heads."""
    assert context.target is not None
    size, vocab_size = context.target.hidden_size, context.vocab_size
    layers = {f"{head}.0.linear.weight": (size, size) for head in range(3)}
    shapes = layers | {f"{head}.1.weight": (vocab_size, size) for head in range(3)}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), {}, random_weights(shapes), "medusa_lm_head.pt")


def _random_hydra(context: DrafterContext) -> str:
    """Three heads behind a prefix layer."""
    assert context.target is not None
    size, vocab_size, prefix = context.target.hidden_size, context.vocab_size, "prefix_embeding_layer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (size,)}
    shapes |= layer_weights(f"{prefix}layers.0.", context.target.config, size)
    shapes[f"{prefix}layers.0.input_layernorm.weight"] = (size,)
    for head in range(3):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{part}.weight"] = (size, (head + 2) * size)
        shapes |= {f"hydra_lm_head.{head}.1.weight": (vocab_size, size), f"hydra_lm_head.{head}.1.bias": (vocab_size,)}
    config = {"hydra_head_arch": "prefix-mlp"}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes), "hydra_lm_head.pt")


def _random_head(context: DrafterContext, kind: str) -> str:
    assert context.target is not None
    return _written_head(kind, context.target.hidden_size, context.vocab_size)


@cache
def _written_head(kind: str, size: int, vocab_size: int) -> str:
    """A head; one of EAGLE-3 reads two hidden states of the target, and drafts all of its tokens but the first."""
    config = {
        "hidden_size": size,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
    }
    shapes = {"fc.weight": (size, 2 * size)}
    if kind == "eagle":
        weights = random_weights(shapes | layer_weights("layers.0.", config, size))
        return write_head(Path(mkdtemp(prefix="emssd-head-")), config, weights)
    config |= {"draft_vocab_size": vocab_size - 1, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    shapes |= {
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        **layer_weights("midlayer.", config, 2 * size),
        "norm.weight": (size,),
        "lm_head.weight": (vocab_size - 1, size),
    }
    ids = {"d2t": torch.ones(vocab_size - 1, dtype=torch.int64)}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes) | ids)


@cache
def _random_adapter(size: int) -> str:
    config = {"hidden_size": size, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    shapes = {name: shape for name, shape in layer_weights("layers.0.", config, size).items() if "self_attn" in name}
    norms = {"layers.0.input_layernorm.weight": (size,), "norm.weight": (size,)}
    return write_head(Path(mkdtemp(prefix="emssd-adapter-")), config, random_weights(shapes | norms))


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@cache
def _written_layer(config: tuple[tuple[str, int], ...], number: int) -> str:
    """A layer for multi-token prediction of random weights."""
    values, prefix = dict(config), f"model.layers.{number}."
    size = values["hidden_size"]
    norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
    shapes = {f"{prefix}{name}.weight": (size,) for name in norms} | {f"{prefix}eh_proj.weight": (size, 2 * size)}
    weights = random_weights(shapes | layer_weights(prefix, values, size))
    return write_head(Path(mkdtemp(prefix="emssd-layer-")), values, weights)


@cache
def _written_block_head(size: int, vocab_size: int) -> str:
    """A block drafter of random weights that reads two hidden states of the target."""
    config = {
        "hidden_size": size,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": [0, 1]},
    }
    shapes = {
        "fc.weight": (size, 2 * size),
        "hidden_norm.weight": (size,),
        "layers.0.input_layernorm.weight": (size,),
        **layer_weights("layers.0.", config, size),
        "norm.weight": (size,),
    }
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes))


def similar_places() -> Any:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "similar_places.py"))["SimilarPlaces"]()


@cache
def _store(vocab_size: int) -> str:
    """A store of random text in a small alphabet, so that something is found, and often wrong."""
    draw, folder = Random(0), Path(mkdtemp(prefix="emssd-store-")) / "store"
    build_store(folder, [[draw.randrange(min(vocab_size, 6)) for _ in range(80)] for _ in range(20)])
    return str(folder)
