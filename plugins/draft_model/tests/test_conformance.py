"""The rules of every drafter, for each kind of tree."""

from __future__ import annotations

from typing import Any, ClassVar

from emssd.testing import DrafterConformance


class TestStatic(DrafterConformance):
    plugin = "draft_model"
    options: ClassVar[dict[str, Any]] = {"tree": "static", "expansion": [2, 1, 2]}


class TestDynamic(DrafterConformance):
    plugin = "draft_model"
    options: ClassVar[dict[str, Any]] = {"tree": "dynamic", "num_nodes": 7, "depth": 3, "top_k": 3}


class TestSequoia(DrafterConformance):
    plugin = "draft_model"
    options: ClassVar[dict[str, Any]] = {"tree": "sequoia", "num_nodes": 7, "depth": 3, "top_k": 3}
    learns_across_requests = True
