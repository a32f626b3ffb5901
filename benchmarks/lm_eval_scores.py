"""Score and time of one generation task in EleutherAI's harness, with `hf` and with `emssd`: the scores must be equal.

The task is made of a local JSONL file of questions and answers as in GSM8K: exact match of the number after ``####``
or, where there is none, of the last number. Nothing comes from the network.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = "1"  # before the harness is imported

_TASK = r"""
task: local_questions
dataset_path: json
dataset_kwargs: {data_files: {test: "PATH"}}
output_type: generate_until
test_split: test
doc_to_text: "TEMPLATE"
doc_to_target: "{{answer.split('####')[-1].strip()}}"
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [",", "\\$", "\\.$"]}
generation_kwargs: {until: ["UNTIL"], do_sample: false, max_gen_toks: LENGTH}
filter_list:
  - name: last-number
    filter:
      - {function: regex, regex_pattern: "(-?[0-9][0-9,]*\\.?[0-9]*)", group_select: -1}
      - {function: take_first}
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with the fields question and answer")
    parser.add_argument("--template", default="Question: {{question}}\\nAnswer:", help="the prompt, in Jinja")
    parser.add_argument("--until", default="Question:", help="stop string")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser


def task_folder(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the task into `folder`, for `TaskManager`."""
    filled = {"PATH": str(arguments.data.resolve()), "TEMPLATE": arguments.template, "UNTIL": arguments.until}
    text = _TASK.replace("LENGTH", str(arguments.max_new_tokens))
    for name, value in filled.items():
        text = text.replace(name, value)
    (folder / "local_questions.yaml").write_text(text)
    return folder


def evaluate(name: str, arguments: argparse.Namespace, tasks: Any) -> dict[str, Any]:
    """Score, seconds and texts with the model `name`; loading it and reading the task do not count."""
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model

    options = {"drafter": arguments.drafter} if name == "emssd" else {}
    model = get_model(name)(
        pretrained=arguments.model, dtype=arguments.dtype, device="cpu", batch_size=arguments.batch_size, **options
    )
    if name == "emssd":
        _ = model.engine  # it tests the model when it is made
    seconds, generate = [0.0], model.generate_until

    def timed(*given: Any, **more: Any) -> list[str]:
        start = time.perf_counter()
        texts: list[str] = generate(*given, **more)
        seconds[0] += time.perf_counter() - start
        return texts

    model.generate_until = timed
    found = simple_evaluate(
        model=model, tasks=["local_questions"], task_manager=tasks, limit=arguments.limit, bootstrap_iters=0
    )
    assert found is not None
    samples = sorted(found["samples"]["local_questions"], key=lambda sample: sample["doc_id"])
    score = found["results"]["local_questions"]["exact_match,last-number"]
    return {"score": score, "seconds": seconds[0], "texts": [sample["resps"][0][0] for sample in samples]}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    from lm_eval.tasks import TaskManager

    import emssd.integrations.lm_eval  # noqa: F401  # it registers the model

    arguments = make_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tasks = TaskManager(include_path=str(task_folder(Path(folder), arguments)), include_defaults=False)
        rows = {name: evaluate(name, arguments, tasks) for name in ("hf", "emssd")}
    hf, ours = rows["hf"], rows["emssd"]
    print("| model | exact match | seconds | times as fast |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['score']:.4f} | {row['seconds']:.1f} | {hf['seconds'] / row['seconds']:.2f} |")
    same = sum(one == other for one, other in zip(hf["texts"], ours["texts"], strict=True))
    print(f"{same} of {len(hf['texts'])} texts are equal")
    if arguments.out:
        arguments.out.write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
