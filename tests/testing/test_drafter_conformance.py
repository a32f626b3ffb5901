"""All first-party drafters pass the suite that strangers' drafters are held to."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import emssd_early_exit
import emssd_kangaroo
import pytest
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
from emssd_rest.drafter import RestDrafter
from emssd_union.drafter import UnionDrafter

from emssd.drafters.heads.options import TreeKind
from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.testing import DrafterConformance
from tests.support.random_drafters import (
    random_adapter,
    random_block_head,
    random_eagle,
    random_hydra,
    random_layer,
    random_medusa,
    random_store,
)

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
        config = KangarooConfig(
            path=random_adapter(context), num_layers=1, num_speculative_tokens=3, min_confidence=0.2
        )
        (spec,) = emssd_kangaroo.emssd_drafters()
        drafter: Drafter = spec.build(config, context)
        return drafter


class TestEagle(DrafterConformance):
    """A head of random weights, of which little is accepted."""

    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return load_eagle(EagleConfig(path=random_eagle(context, "eagle"), tree=TreeKind.static), context)


class TestEagle3(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        path = random_eagle(context, "eagle3")
        return load_eagle3(Eagle3Config(path, num_nodes=7, depth=3, top_k=3, layer_ids=LayerIds.hs), context)


class TestEagle3Chain(DrafterConformance):
    """It measures first how its head is meant, so it drafts otherwise beside other requests."""

    num_examples = 2
    learns_across_requests = True

    def make_drafter(self, context: DrafterContext) -> Drafter:
        path = random_eagle(context, "eagle3")
        return load_eagle3(Eagle3Config(path, tree=TreeKind.chain, depth=3), context)


class TestDFlash(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return DFlashDrafter.load(DFlashConfig(path=random_block_head(context)), context)


class TestMtp(DrafterConformance):
    """A layer of random weights, of which little is accepted."""

    num_examples = 2
    models = ("llama",)  # whose layers have rotary positions

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return load_mtp(MtpConfig(path=random_layer(context)), context)


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


class TestANPDOfGroups(DrafterConformance):
    plugin = "anpd"
    options = {"group_tokens": 200}  # noqa: RUF012
    learns_across_requests = True


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
        return RestDrafter.load(RestConfig(store=random_store(context.vocab_size), min_match=1), context)


class TestRestTree(DrafterConformance):
    def make_drafter(self, context: DrafterContext) -> Drafter:
        config = RestConfig(store=random_store(context.vocab_size), min_match=1, branches=4, num_speculative_tokens=4)
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
        return MedusaDrafter.load(MedusaConfig(path=random_medusa(context), num_nodes=7), context)


class TestHydra(DrafterConformance):
    num_examples = 2

    def make_drafter(self, context: DrafterContext) -> Drafter:
        return HydraDrafter.load(HydraConfig(path=random_hydra(context), num_nodes=7, top_k=3), context)


def similar_places() -> Any:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "similar_places.py"))["SimilarPlaces"]()
