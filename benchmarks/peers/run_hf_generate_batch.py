"""Runner of Hugging Face ``generate_batch``, its continuous batching; greedy only."""

from __future__ import annotations

import argparse

from protocol import Build, Engine, Request, Tokens, options_of, serve

PAGE_SIZE, MAX_STEP_TOKENS = 256, 512  # tokens; the first is its default


def load(arguments: argparse.Namespace) -> Build:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    options_of(arguments.option, {})
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model = model.to(arguments.device).eval()

    def build(request: Request) -> Engine:
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            # Without a number it takes most of the machine's memory.
            num_blocks=request.batch_size * (request.max_length // PAGE_SIZE + 2),
            max_requests_per_batch=request.batch_size,
            max_batch_tokens=MAX_STEP_TOKENS,
            allow_block_sharing=False,
        )

        def generate(prompts: Tokens, new: int) -> Tokens:
            config = GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=request.eos or None, pad_token_id=0
            )
            done = model.generate_batch(
                inputs=prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
            )
            return [list(row.generated_tokens) for row in done.values()]  # in the order of the inputs

        return Engine(generate)

    return build


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
