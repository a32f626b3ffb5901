"""Runner of OpenVINO GenAI's continuous batching; exports the models first, once for each.

``max_num_seqs`` does not hold with ``dynamic_split_fuse``, its default: all requests that were added run together. So
this runner adds no more than `batch_size` requests at a time, and the next one as soon as one has ended.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from protocol import COPIED, DRAFTED, MATCHED, Build, Engine, Request, Tokens, options_of, serve

CACHE_GIB = 2
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


def load(arguments: argparse.Namespace) -> Build:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    precision = PRECISIONS[arguments.dtype]
    options = options_of(arguments.option, {"export": "openvino-export", "kv_precision": precision})
    properties = {
        "KV_CACHE_PRECISION": options["kv_precision"],
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": arguments.threads,
    }
    folder = Path(options["export"])
    exported = export(arguments.model, folder, arguments.dtype)

    def build(request: Request) -> Engine:
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_seqs, scheduling.cache_size = request.batch_size, CACHE_GIB
        extra: dict[str, Any] = {}
        if request.mode == "ngram":
            extra["prompt_lookup"] = True
        elif request.mode == "draft_model":
            draft = export(arguments.draft_model, folder, arguments.dtype)
            extra["draft_model"] = genai.draft_model(str(draft), "CPU", **properties)
        pipeline = genai.ContinuousBatchingPipeline(str(exported), scheduling, "CPU", {**properties, **extra})
        most = 0

        def generate(prompts: Tokens, new: int) -> Tokens:
            nonlocal most
            config = generation_config(genai, request, new)
            waiting = deque((i, ov.Tensor(np.array([row], dtype=np.int64))) for i, row in enumerate(prompts))
            running: dict[int, Any] = {}
            rows: dict[int, list[int]] = {}
            while waiting or running:
                while waiting and len(running) < request.batch_size:
                    i, ids = waiting.popleft()
                    running[i] = pipeline.add_request(i, ids, config)
                pipeline.step()
                most = max(most, pipeline.get_metrics().scheduled_requests)
                for i in [i for i, row in running.items() if row.get_status() != genai.GenerationStatus.RUNNING]:
                    rows[i] = list(running.pop(i).read_all()[0].generated_ids)
            return [rows[i] for i in range(len(prompts))]

        return Engine(generate, lambda: {"most_rows": most, "kv_precision": options["kv_precision"]})

    return build


def generation_config(genai: Any, request: Request, new: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = new, False, False
    if request.eos:
        config.eos_token_id, config.stop_token_ids = request.eos[0], set(request.eos)
    if request.mode == "ngram":
        config.num_assistant_tokens, config.max_ngram_size = COPIED, MATCHED
    elif request.mode == "draft_model":
        config.num_assistant_tokens = DRAFTED
    return config


def export(model: str, folder: Path, dtype: str) -> Path:
    """The folder of `model` in OpenVINO's format, made if it is not there. Its name follows the model's content."""
    digest = hashlib.sha256()
    for file in [*sorted(Path(model).glob("*.safetensors")), Path(model) / "config.json"]:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    weights = "fp32" if dtype == "float32" else "fp16"  # its format has no choice of bfloat16
    made = folder / f"{Path(model).name}-{weights}-{digest.hexdigest()[:12]}"
    if not (made / "openvino_model.bin").is_file():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", model]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, str(made)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return made


if __name__ == "__main__":
    serve(load, ["openvino", "openvino-genai", "openvino-tokenizers"])
