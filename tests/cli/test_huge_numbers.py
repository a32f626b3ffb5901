"""Numbers that no tensor holds are refused in a sentence, as a fault of the prompt that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

HUGE = (2**64, 10**400, -(10**400), 1e308)
OPTIONS = ("temperature", "top_k", "repetition_penalty", "presence_penalty", "n", "seed", "logprobs")


def test_a_huge_number_is_a_fault_of_one_prompt(emssd: Callable, model: str, tmp_path: Path) -> None:
    asked = [{"how": {option: number}} for option in OPTIONS for number in HUGE]
    asked += [{"how": {"logit_bias": {"5": number}, "temperature": 1e-6}} for number in HUGE]
    asked += [{"how": {"logit_bias": {digits * "9": 1}}} for digits in (18, 19, 5000)]
    asked += [{"limit": number} for number in HUGE]
    good = {"prompt": "abc", "how": None, "limit": None}
    lines = [json.dumps(good | each | {"id": str(number)}) for number, each in enumerate([*asked, {}])]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    fields = ("data.id_field=id", "data.sampling_field=how", "data.max_new_tokens_field=limit")
    options = [f"model.path={model}", "data=jsonl", f"data.path={path}", *fields, "max_new_tokens=2", "output_dir=out"]
    result = emssd(*options, "model.max_model_len=16", "sampling.temperature=1", "on_error=skip")
    errors = {row["id"]: row["error"] for row in map(json.loads, (result.folder / "errors.jsonl").open())}
    assert str(len(asked)) in {row["id"] for row in result.rows}
    assert len(result.rows) + len(errors) == len(lines)
    assert (
        errors["1"]
        == "prompt 1: sampling.temperature is a number of more than 308 digits; it must be 0 or at least 1e-06"
    )
    assert errors["16"].startswith(
        "prompt 16: sampling.n is 18446744073709551616; it must be a whole number of at least 1"
    )
    assert "…; it must be a whole number of at least 0, and in the model's vocabulary" in errors["34"]
