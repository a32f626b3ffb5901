"""The paper's figures, as data: what EMS-SD (its Tables 2 to 4, its appendix and its text) says was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "CNN_DAILYMAIL", "DATASETS", "DRAFTED", "GREATEST_BATCH", "GREEDY_TPS", "PADDING", "STEP_MS", "TABLES", "Entry",
    "datasheet_tokens", "disagreements", "label", "speedups",
]  # fmt: skip

CNN_DAILYMAIL = "CNN/Daily Mail"
DRAFTED = {"llma": 7, "draft_model": 4}
"""Tokens per draft: LLMA copies 7 behind 2 that match, OPT-125m drafts 4."""

GREATEST_BATCH = 24
"""Rows, of the largest batch in its tables."""

STEP_MS = {1: 16.6, 5: 22.6}
"""The inference time figure, as quoted: ms of a step of OPT-6.7b, 16 rows behind 512 tokens, by tokens per sample."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A padding ratio that the paper quotes: padding tokens per new token, as its code counts them."""

    drafter: str
    model: str
    batch_size: int
    share: float
    data: str = CNN_DAILYMAIL
    said: str = "above "


PADDING = (
    Padding("llma", "opt-13b", 12, 1.15),
    Padding("llma", "opt-6.7b", 8, 0.60),
    Padding("draft_model", "opt-6.7b", 8, 0.20),
    Padding("draft_model", "opt-13b", 8, 0.3082, said=""),
    Padding("draft_model", "opt-13b", 8, 0.8912, "GSM8K", said=""),
    Padding("draft_model", "opt-13b", 8, 0.1323, "MT-Bench", said=""),
)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Appendix C, batch size 8, OPT-13b with OPT-125m: mean input and greatest output length in tokens."""

    name: str
    input_length: float
    output_length: int
    padding_percent: float
    vanilla: float
    ours: float


DATASETS = (
    Dataset(CNN_DAILYMAIL, 744.94, 128, 30.82, 1.62, 2.07),
    Dataset("GSM8K", 1240.99, 128, 89.12, 1.03, 1.51),
    Dataset("MT-Bench", 220.84, 1024, 13.23, 1.72, 2.49),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure of a table.

    Attributes:
        table: which one.
        method: as this project names it.
        tps, greedy_tps: tokens/s; of plain greedy decoding in the same table.
        speedup: as printed.
    """

    table: str
    drafter: str
    model: str
    data: str
    batch_size: int
    method: str
    tps: float
    greedy_tps: float
    speedup: float


_ABLATION = {  # batch size: greedy TPS; TPS and speed-up of vanilla, unpad_kv, unpad_inputs, unpad_both
    2: (137.49, (441.64, 3.21), (439.40, 3.20), (477.72, 3.47), (480.59, 3.50)),
    4: (257.37, (581.54, 2.26), (610.41, 2.37), (728.86, 2.83), (729.17, 2.83)),
    8: (468.89, (640.58, 1.37), (687.11, 1.47), (948.71, 2.02), (1017.75, 2.17)),
    16: (774.59, (640.94, 0.83), (734.86, 0.95), (1134.25, 1.46), (1264.07, 1.63)),
    24: (936.45, (616.19, 0.66), (708.53, 0.76), (1150.16, 1.23), (1321.45, 1.41)),
}

_Columns = tuple[tuple[float | None, ...], ...]  # batch size, greedy TPS, vanilla TPS, speed-up, ours TPS, speed-up

_LLMA_2_7B: _Columns = (
    (1, 128.31, 389.61, 3.04, None, None),
    (2, 205.95, 484.31, 2.35, 550.62, 2.67),
    (4, 362.88, 545.67, 1.50, 707.25, 1.95),
    (8, 643.38, 527.27, 0.82, 885.83, 1.38),
    (12, 881.70, 521.42, 0.59, 973.53, 1.10),
    (16, 1087.33, 521.16, 0.48, 1072.35, 0.99),
)
_LLMA_13B: _Columns = (
    (1, 59.51, 219.82, 3.69, None, None),
    (2, 95.33, 295.37, 3.10, 325.79, 3.42),
    (4, 160.31, 374.24, 2.34, 441.02, 2.75),
    (8, 278.70, 379.05, 1.36, 578.22, 2.07),
    (12, 375.74, 371.32, 0.99, 610.32, 1.62),
    (16, 468.58, 378.50, 0.81, 649.84, 1.39),
    (20, 540.07, 390.93, 0.72, 742.46, 1.37),
    (24, 593.53, 401.34, 0.68, 779.77, 1.31),
)
_DRAFT_2_7B: _Columns = (
    (1, 128.31, 213.08, 1.66, None, None),
    (2, 205.95, 306.42, 1.49, 318.34, 1.55),
    (4, 362.88, 452.65, 1.25, 502.58, 1.38),
    (8, 643.38, 611.80, 0.95, 777.10, 1.21),
    (12, 881.70, 685.64, 0.78, 944.82, 1.07),
)
_DRAFT_6_7B: _Columns = (
    (1, 79.44, 177.69, 2.24, None, None),
    (2, 137.49, 273.53, 1.99, 285.82, 2.08),
    (4, 257.37, 432.38, 1.68, 485.98, 1.89),
    (8, 468.89, 582.28, 1.24, 782.75, 1.67),
    (12, 644.47, 635.49, 0.99, 945.47, 1.47),
    (16, 774.59, 675.88, 0.87, 1063.31, 1.37),
    (20, 863.32, 709.52, 0.82, 1161.78, 1.35),
    (24, 936.45, 728.04, 0.78, 1258.50, 1.34),
)
_DRAFT_13B: _Columns = (
    (1, 59.51, 137.62, 2.31, None, None),
    (2, 95.33, 201.51, 2.11, 223.16, 2.34),
    (4, 160.13, 305.09, 1.91, 359.14, 2.24),
    (8, 278.70, 452.15, 1.62, 576.97, 2.07),
    (12, 375.74, 494.12, 1.32, 728.86, 1.94),
    (16, 468.58, 532.73, 1.14, 846.73, 1.81),
    (20, 540.07, 578.33, 1.07, 913.09, 1.69),
    (24, 593.53, 612.64, 1.03, 974.63, 1.64),
)
_DRAFT_13B_GSM8K: _Columns = (
    (1, 79.11, 186.64, 2.36, None, None),
    (2, 89.24, 99.96, 1.12, 156.77, 1.76),
    (4, 163.54, 183.14, 1.12, 273.70, 1.67),
    (8, 310.15, 318.07, 1.03, 467.35, 1.51),
    (12, 436.10, 389.36, 0.89, 593.25, 1.36),
    (16, 554.62, 413.12, 0.74, 631.31, 1.14),
    (20, 646.97, 470.98, 0.73, 720.56, 1.12),
    (24, 722.49, 514.06, 0.71, 798.40, 1.11),
)
_DRAFT_13B_MT_BENCH: _Columns = (
    (1, 59.59, 151.72, 2.55, None, None),
    (2, 112.83, 257.65, 2.28, 300.03, 2.66),
    (4, 202.57, 442.06, 2.18, 531.44, 2.62),
    (8, 374.14, 642.18, 1.72, 931.24, 2.45),
    (12, 519.41, 699.02, 1.35, 1175.50, 2.26),
    (16, 654.17, 758.04, 1.16, 1310.58, 2.00),
    (20, 777.47, 881.30, 1.13, 1494.98, 1.92),
    (24, 856.29, 848.97, 0.99, 1603.13, 1.87),
)


def _entries() -> Iterator[Entry]:
    methods = ("vanilla", "unpad_kv", "unpad_inputs", "unpad_both")
    for size, (greedy, *pairs) in _ABLATION.items():
        for method, (tps, ratio) in zip(methods, pairs, strict=True):
            yield Entry("Table 2", "llma", "opt-6.7b", CNN_DAILYMAIL, size, method, tps, greedy, ratio)
    yield from _of_columns("Table 3", "llma", "opt-2.7b", CNN_DAILYMAIL, _LLMA_2_7B)
    yield from _of_columns("Table 3", "llma", "opt-13b", CNN_DAILYMAIL, _LLMA_13B)
    yield from _of_columns("Table 4", "draft_model", "opt-2.7b", CNN_DAILYMAIL, _DRAFT_2_7B)
    yield from _of_columns("Table 4", "draft_model", "opt-6.7b", CNN_DAILYMAIL, _DRAFT_6_7B)
    yield from _of_columns("Table 4", "draft_model", "opt-13b", CNN_DAILYMAIL, _DRAFT_13B)
    yield from _of_columns("appendix", "draft_model", "opt-13b", "GSM8K", _DRAFT_13B_GSM8K)
    yield from _of_columns("appendix", "draft_model", "opt-13b", "MT-Bench", _DRAFT_13B_MT_BENCH)


def _of_columns(table: str, drafter: str, model: str, data: str, columns: _Columns) -> Iterator[Entry]:
    for size, greedy, *figures in columns:
        assert size is not None
        assert greedy is not None
        for method, tps, ratio in (("vanilla", *figures[:2]), ("unpad_both", *figures[2:])):
            if tps is not None and ratio is not None:
                yield Entry(table, drafter, model, data, int(size), str(method), float(tps), greedy, float(ratio))


TABLES = tuple(_entries())
"""All speed-ups of the paper's tables. At batch size 1 nothing is padded: "vanilla" is single-sample speculation."""

GREEDY_TPS = {(each.table, each.model, each.data, each.batch_size): each.greedy_tps for each in TABLES}
"""Tokens/s of plain greedy decoding, by table, model, data and batch size."""


def label(model: str) -> str:
    """How the text spells a model: OPT-6.7b."""
    return model.replace("opt", "OPT")


def speedups(drafter: str, model: str, method: str, data: str = CNN_DAILYMAIL) -> dict[int, float]:
    """By batch size; empty where the paper has none."""
    wanted = (drafter, model, method, data)
    return {
        each.batch_size: each.speedup for each in TABLES if (each.drafter, each.model, each.method, each.data) == wanted
    }


def disagreements(*tables: str) -> list[str]:
    """Where figures of the paper's tables contradict each other, beyond their rounding.

    Args:
        tables: only these; all without.
    """
    found = []
    for each in TABLES:
        if (not tables or each.table in tables) and abs(each.tps / each.greedy_tps - each.speedup) > 0.005 + 1e-9:
            found.append(
                f"{each.table}, {each.model}, {each.data}, batch size {each.batch_size}, {each.method}: "
                f"{each.tps:.2f} ÷ {each.greedy_tps:.2f} is {each.tps / each.greedy_tps:.3f}, printed "
                f"{each.speedup:.2f}"
            )
    for (table, model, data, size), tps in GREEDY_TPS.items():
        for (other, *cell), theirs in GREEDY_TPS.items():
            same = cell == [model, data, size] and other > table
            if same and theirs != tps and (not tables or {table, other} & set(tables)):
                found.append(f"greedy {model}, batch size {size}: {tps:.2f} in {table}, {theirs:.2f} in {other}")
    for dataset in DATASETS if not tables or "appendix" in tables else ():
        for method, printed in (("vanilla", dataset.vanilla), ("unpad_both", dataset.ours)):
            theirs = speedups("draft_model", "opt-13b", method, dataset.name)[8]
            if theirs != printed:
                found.append(
                    f"{dataset.name}, batch size 8, {method}: {theirs:.2f} in one table, {printed:.2f} in the other"
                )
    return found


_A100 = {"FLOP/s, float16": 312e12, "GB/s, 40 GB": 1555e9, "GB/s, 80 GB": 2039e9}  # NVIDIA's data sheet


def datasheet_tokens() -> tuple[float, float]:
    """How many tokens of a step an A100 computes, by its data sheet, while it reads the float16 weights they share.

    Per weight two bytes are read, and two operations are done for each token. Least and most, of its two memories.
    """
    rate = _A100["FLOP/s, float16"]
    return rate / _A100["GB/s, 80 GB"], rate / _A100["GB/s, 40 GB"]
