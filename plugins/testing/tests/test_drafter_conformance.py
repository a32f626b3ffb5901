"""All first-party drafters pass the suite that strangers' drafters are held to."""

from __future__ import annotations

import runpy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emssd_testing import DrafterConformance
from emssd_union.drafter import UnionDrafter

from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.hooks.registry import Registry
from tests.support.every_drafter import DRAFTERS

pytestmark = pytest.mark.costly("holds a plugin to every rule")

COPY = {"match_length": 1, "copy_length": 3}
LEARN = {  # or measure first how a head is meant, and so draft otherwise beside other requests
    *("draft_model, sequoia", "eagle3, chain", "ngrammys", "suffix, tree", "token_recycling", "union"),
}
# Without an engine there is no KV cache to share, and `self` drafts nothing; plugins/self_draft/tests has engines.
RUN_NO_MODEL = {"none", "anpd", "llma", "llma, tree", "lookahead", "ngrammys", "pld", "suffix", "token_recycling"}
NAMES = [name for name in DRAFTERS if not name.startswith("replay")]  # it must know the requests beforehand


@cache
def registry() -> Registry:
    return Registry()


def suite_of(name: str) -> type[DrafterConformance]:
    """The suite of one of `DRAFTERS`. Trained parts have random weights, so that little is accepted."""

    def make_drafter(self: DrafterConformance, context: DrafterContext) -> Any:
        files = SimpleNamespace(path=lambda write, *arguments: write(context.target, *arguments), target=context)
        config = DRAFTERS[name](files, {}) if callable(DRAFTERS[name]) else DRAFTERS[name]
        (build,) = (spec.build for spec in registry().specs("drafter") if spec.config is type(config))
        return build(config, context)

    attributes: dict[str, Any] = {"make_drafter": make_drafter, "learns_across_requests": name in LEARN}
    if not callable(config := DRAFTERS[name]):
        attributes |= {"config": type(config), "options": asdict(config)}
    if name not in RUN_NO_MODEL:
        attributes["num_examples"] = 2  # a model in the loop takes its time
    if name.startswith("mtp"):
        attributes["models"] = ("llama",)  # only its layers have rotary positions
    return type(f"Test{name.title().replace(', ', '')}", (DrafterConformance,), attributes)


globals().update({suite.__name__: suite for suite in map(suite_of, NAMES)})


class TestAnpdOfGroups(DrafterConformance):
    plugin = "anpd"
    options = {"group_tokens": 200}  # noqa: RUF012
    learns_across_requests = True


class TestHiddenStates(DrafterConformance):
    """The drafter of the page about hidden states."""

    file, name = "similar_places.py", "SimilarPlaces"

    def make_drafter(self, context: DrafterContext) -> Any:
        return runpy.run_path(str(Path(__file__).parents[3] / "examples" / self.file))[self.name]()


class TestTwoWays(TestHiddenStates):
    """That of the page about trees."""

    file, name = "two_ways.py", "TwoWays"


class TestHiddenStatesWithinAUnion(TestHiddenStates):
    def make_drafter(self, context: DrafterContext) -> Drafter:
        both = [super().make_drafter(context), context.make_drafter("llma", COPY)]
        return UnionDrafter([CheckedDrafter(drafter, None, context.vocab_size, on_error="fail") for drafter in both])
