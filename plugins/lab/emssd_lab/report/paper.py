"""The paper's figures, as data: what EMS-SD (its Tables 2 to 4, its appendix and its text) says was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CNN_DAILYMAIL", "DATASETS", "PADDING", "SPEEDUPS", "STEP_MS", "STEP_ROWS", "label"]

CNN_DAILYMAIL = "CNN/Daily Mail"

STEP_ROWS = 16
STEP_MS = {1: 16.6, 5: 22.6}
"""The inference time figure, as quoted: ms of a step of OPT-6.7b, 16 rows after 512 tokens, by tokens per sample."""


class Padding(NamedTuple):
    """A padding ratio that the text quotes as exceeded: padding tokens per new token, as the paper's code counts."""

    drafter: str
    model: str
    batch_size: int
    share: float


PADDING = (
    Padding("llma", "opt-13b", 12, 1.15),
    Padding("llma", "opt-6.7b", 8, 0.60),
    Padding("draft_model", "opt-6.7b", 8, 0.20),
)


class Dataset(NamedTuple):
    """Appendix C, batch size 8, OPT-13b with OPT-125m: mean input and greatest output length in tokens."""

    name: str
    input_length: float
    output_length: int
    padding: float
    vanilla: float
    ours: float


DATASETS = (
    Dataset(CNN_DAILYMAIL, 744.94, 128, 0.3082, 1.62, 2.07),
    Dataset("GSM8K", 1240.99, 128, 0.8912, 1.03, 1.51),
    Dataset("MT-Bench", 220.84, 1024, 0.1323, 1.72, 2.49),
)

SPEEDUPS: Mapping[tuple[str, str, str], Mapping[str, Mapping[int, float]]] = {
    ("llma", "opt-2.7b", CNN_DAILYMAIL): {  # Table 3
        "vanilla": {1: 3.04, 2: 2.35, 4: 1.50, 8: 0.82, 12: 0.59, 16: 0.48},
        "unpad_both": {2: 2.67, 4: 1.95, 8: 1.38, 12: 1.10, 16: 0.99},
    },
    ("llma", "opt-6.7b", CNN_DAILYMAIL): {  # Table 2
        "vanilla": {2: 3.21, 4: 2.26, 8: 1.37, 16: 0.83, 24: 0.66},
        "unpad_kv": {2: 3.20, 4: 2.37, 8: 1.47, 16: 0.95, 24: 0.76},
        "unpad_inputs": {2: 3.47, 4: 2.83, 8: 2.02, 16: 1.46, 24: 1.23},
        "unpad_both": {2: 3.50, 4: 2.83, 8: 2.17, 16: 1.63, 24: 1.41},
    },
    ("llma", "opt-13b", CNN_DAILYMAIL): {  # Table 3
        "vanilla": {1: 3.69, 2: 3.10, 4: 2.34, 8: 1.36, 12: 0.99, 16: 0.81, 20: 0.72, 24: 0.68},
        "unpad_both": {2: 3.42, 4: 2.75, 8: 2.07, 12: 1.62, 16: 1.39, 20: 1.37, 24: 1.31},
    },
    ("draft_model", "opt-2.7b", CNN_DAILYMAIL): {  # Table 4
        "vanilla": {1: 1.66, 2: 1.49, 4: 1.25, 8: 0.95, 12: 0.78},
        "unpad_both": {2: 1.55, 4: 1.38, 8: 1.21, 12: 1.07},
    },
    ("draft_model", "opt-6.7b", CNN_DAILYMAIL): {
        "vanilla": {1: 2.24, 2: 1.99, 4: 1.68, 8: 1.24, 12: 0.99, 16: 0.87, 20: 0.82, 24: 0.78},
        "unpad_both": {2: 2.08, 4: 1.89, 8: 1.67, 12: 1.47, 16: 1.37, 20: 1.35, 24: 1.34},
    },
    ("draft_model", "opt-13b", CNN_DAILYMAIL): {
        "vanilla": {1: 2.31, 2: 2.11, 4: 1.91, 8: 1.62, 12: 1.32, 16: 1.14, 20: 1.07, 24: 1.03},
        "unpad_both": {2: 2.34, 4: 2.24, 8: 2.07, 12: 1.94, 16: 1.81, 20: 1.69, 24: 1.64},
    },
    ("draft_model", "opt-13b", "GSM8K"): {  # appendix
        "vanilla": {1: 2.36, 2: 1.12, 4: 1.12, 8: 1.03, 12: 0.89, 16: 0.74, 20: 0.73, 24: 0.71},
        "unpad_both": {2: 1.76, 4: 1.67, 8: 1.51, 12: 1.36, 16: 1.14, 20: 1.12, 24: 1.11},
    },
    ("draft_model", "opt-13b", "MT-Bench"): {
        "vanilla": {1: 2.55, 2: 2.28, 4: 2.18, 8: 1.72, 12: 1.35, 16: 1.16, 20: 1.13, 24: 0.99},
        "unpad_both": {2: 2.66, 4: 2.62, 8: 2.45, 12: 2.26, 16: 2.00, 20: 1.92, 24: 1.87},
    },
}
"""Speed-ups as printed, by batch size; of drafter, model and data, and of a method by this project's name.

At batch size 1 nothing is padded: "vanilla" is single-sample speculation there.
"""


def label(model: str) -> str:
    """The spelling of a model in texts: OPT-6.7b."""
    return model.replace("opt", "OPT")
