"""All first-party drafters pass the suite that strangers' drafters are held to."""

from __future__ import annotations

from emssd.testing.conformance import DrafterConformance


class TestNone(DrafterConformance):
    plugin = "none"


class TestLLMA(DrafterConformance):
    plugin = "llma"
    options = {"match_length": 1, "search": "prompt_and_output", "require_full_copy": False}  # noqa: RUF012


class TestDraftModel(DrafterConformance):
    plugin = "draft_model"
    num_examples = 2  # a model in the loop takes its time


class TestCascade(DrafterConformance):
    plugin = "cascade"
    num_examples = 2
    options = {"options": {"llma": {"match_length": 1, "copy_length": 3}}}  # noqa: RUF012
