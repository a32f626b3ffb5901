"""All first-party drafters pass the suite that strangers' drafters are held to."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emssd_early_exit import EarlyExitConfig
from emssd_heads.dflash import DFlashConfig
from emssd_heads.eagle import EagleConfig
from emssd_heads.eagle3 import Eagle3Config, LayerIds
from emssd_heads.hydra import HydraConfig
from emssd_heads.kangaroo import KangarooConfig
from emssd_heads.medusa import MedusaConfig
from emssd_heads.mtp import MtpConfig
from emssd_heads.options import TreeKind
from emssd_heads.pard.drafter import PardDrafter
from emssd_rest import RestConfig
from emssd_testing import DrafterConformance
from emssd_union.drafter import UnionDrafter

from emssd.draft_models.layer_options import LayerTreeKind
from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.hooks.registry import Registry
from tests.support import random_drafters as written

pytestmark = pytest.mark.costly("holds a plugin to every rule")

TREE: dict[str, Any] = {"num_nodes": 7, "depth": 3, "top_k": 3}
COPY = {"match_length": 1, "copy_length": 3}
SMALL = {"path": "small"}
STATIC = {"path": "small", "tree": "static", "expansion": [2, 1, 2]}
BESIDE = {"drafters": ["llma", "draft_model"], "options": {"llma": COPY, "draft_model": SMALL}}
LLMA = {"match_length": 1, "search": "prompt_and_output", "require_full_copy": False}
PLD = {"max_ngram_size": 2, "num_speculative_tokens": 3, "require_full_copy": False}
LEARNS = {"learns_across_requests": True}
MODEL = {"num_examples": 2}  # a model in the loop takes its time


@cache
def registry() -> Registry:
    return Registry()


def built(config: Callable[[DrafterContext], Any], **attributes: Any) -> dict[str, Any]:
    """The suite of a drafter whose config needs files, as weights at random, of which little is accepted."""

    def make_drafter(self: DrafterConformance, context: DrafterContext) -> Drafter:
        chosen = config(context)
        (build,) = (spec.build for spec in registry().specs("drafter") if spec.config is type(chosen))
        return build(chosen, context)

    return MODEL | attributes | {"make_drafter": make_drafter}


def similar_places() -> Any:
    return runpy.run_path(str(Path(__file__).parents[3] / "examples" / "similar_places.py"))["SimilarPlaces"]()


def beside_another(self: DrafterConformance, context: DrafterContext) -> Drafter:
    both = [similar_places(), context.make_drafter("llma", COPY)]
    return UnionDrafter([CheckedDrafter(each, None, context.vocab_size, on_error="fail") for each in both])


def pard(self: DrafterConformance, context: DrafterContext) -> Drafter:
    return PardDrafter(context.load_runner("any")[0], context.vocab_size, 0, 4)


SUITES: dict[str, dict[str, Any]] = {
    "None": {"plugin": "none"},
    "LLMA": {"plugin": "llma", "options": LLMA},
    "LLMATree": {"plugin": "llma", "options": LLMA | {"branches": 3, "copy_length": 4}},
    "DraftModel": MODEL | {"plugin": "draft_model", "options": SMALL},
    "DraftModelStatic": MODEL | {"plugin": "draft_model", "options": STATIC},
    "DraftModelDynamic": MODEL | {"plugin": "draft_model", "options": SMALL | TREE | {"tree": "dynamic"}},
    "DraftModelSequoia": MODEL | LEARNS | {"plugin": "draft_model", "options": SMALL | TREE | {"tree": "sequoia"}},
    # Without an engine there is no KV cache to share, and nothing is drafted; plugins/self_draft/tests has engines.
    "Self": MODEL | {"plugin": "self"},
    "EarlyExit": built(lambda _: EarlyExitConfig(depth=3, min_confidence=0.3)),
    "EarlyExitTree": built(lambda _: EarlyExitConfig(tree=LayerTreeKind.dynamic, **TREE)),
    "Kangaroo": built(
        lambda context: KangarooConfig(
            path=written.random_adapter(context), num_layers=1, num_speculative_tokens=3, min_confidence=0.2
        )
    ),
    "Eagle": built(lambda context: EagleConfig(written.random_eagle(context, "eagle"), tree=TreeKind.static)),
    "Eagle3": built(
        lambda context: Eagle3Config(written.random_eagle(context, "eagle3"), layer_ids=LayerIds.hs, **TREE)
    ),
    # It measures first how its head is meant, so it drafts otherwise beside other requests.
    "Eagle3Chain": built(
        lambda context: Eagle3Config(written.random_eagle(context, "eagle3"), tree=TreeKind.chain, depth=3), **LEARNS
    ),
    "DFlash": built(lambda context: DFlashConfig(written.random_block_head(context))),
    # Only the layers of a Llama have rotary positions.
    "Mtp": built(lambda context: MtpConfig(written.random_layer(context)), models=("llama",)),
    "Medusa": built(lambda context: MedusaConfig(written.random_medusa(context), num_nodes=7)),
    "Hydra": built(lambda context: HydraConfig(written.random_hydra(context), num_nodes=7, top_k=3)),
    "Pard": MODEL | {"make_drafter": pard},
    "Cascade": MODEL | {"plugin": "cascade", "options": BESIDE},
    "Auto": {"plugin": "auto"},
    "PLD": {"plugin": "pld", "options": PLD},
    "PLDTree": {"plugin": "pld", "options": PLD | {"branches": 2, "occurrence": "last"}},
    "Suffix": {"plugin": "suffix"},
    "SuffixTree": {
        "plugin": "suffix",
        "options": {"branches": 3, "num_speculative_tokens": 4, "max_spec_factor": 2.0},
    },
    "SuffixWithCache": LEARNS | {"plugin": "suffix", "options": {"cache_tokens": 200, "cache_bias": 0}},
    "Lookahead": {"plugin": "lookahead", "options": {"window": 3, "ngram": 3, "guesses": 2}},
    "ANPD": {"plugin": "anpd"},
    "ANPDOfGroups": LEARNS | {"plugin": "anpd", "options": {"group_tokens": 200}},
    "NGrammys": LEARNS | {"plugin": "ngrammys", "options": {"num_candidates": 3, "num_nodes": 6}},
    "TokenRecycling": LEARNS | {"plugin": "token_recycling", "options": {"num_candidates": 3, "num_nodes": 6}},
    "Rest": built(lambda context: RestConfig(written.random_store(context.vocab_size), min_match=1), num_examples=None),
    "RestTree": built(
        lambda context: RestConfig(
            written.random_store(context.vocab_size), min_match=1, branches=4, num_speculative_tokens=4
        ),
        num_examples=None,
    ),
    "Union": {
        "plugin": "union",
        "options": {"drafters": ["llma", "suffix"], "options": {"llma": COPY, "suffix": {"branches": 2}}},
    },
    "UnionWithADraftModel": MODEL | {"plugin": "union", "options": BESIDE},
    "HiddenStates": {"make_drafter": lambda self, context: similar_places()},  # of the page about hidden states
    "HiddenStatesWithinAUnion": {"make_drafter": beside_another},
}
globals().update({f"Test{name}": type(f"Test{name}", (DrafterConformance,), own) for name, own in SUITES.items()})
