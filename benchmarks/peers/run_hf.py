"""Runner of Hugging Face ``generate``: left-padded static batches in file order, speculation at batch 1 only."""

from __future__ import annotations

import argparse
from typing import Any

from protocol import COPIED, DRAFTED, MATCHED, Build, Engine, Request, Tokens, options_of, serve


def load(arguments: argparse.Namespace) -> Build:
    import torch
    from transformers import AutoModelForCausalLM

    options_of(arguments.option, {})
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)

    def model_of(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(arguments.device).eval()

    model = model_of(arguments.model)

    def build(request: Request) -> Engine:
        extra: dict[str, Any] = {}
        if request.mode == "ngram":
            extra = {"prompt_lookup_num_tokens": COPIED, "max_matching_ngram_size": MATCHED}
        elif request.mode == "draft_model":
            draft = model_of(arguments.draft_model)
            draft.generation_config.num_assistant_tokens = DRAFTED
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0  # always DRAFTED tokens, as elsewhere
            extra = {"assistant_model": draft}
        if extra and request.batch_size > 1:
            raise ValueError(f"generate speculates at batch 1 only, not at {request.batch_size}")

        def generate(prompts: Tokens, new: int) -> Tokens:
            rows: Tokens = []
            for start in range(0, len(prompts), request.batch_size):
                batch = prompts[start : start + request.batch_size]
                width = max(map(len, batch))
                ids = torch.tensor([[0] * (width - len(row)) + row for row in batch], device=model.device)
                mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
                with torch.inference_mode():
                    done = model.generate(
                        input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
                        eos_token_id=request.eos or None, **extra,
                    )  # fmt: skip
                rows += done[:, width:].tolist()
            return rows

        return Engine(generate)

    return build


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
