"""Runner of emssd itself, with continuous batches.

Options are those of the engine, ``NAME=VALUE``, and of its parts, ``PART.NAME=VALUE``: ``backend=padded``,
``backend.pad_kv=false``, ``budget=fixed``, ``max_step_tokens=256``. The drafter of a mode goes by the mode's name:
``ngram=cascade``, ``ngram.copy_length=10``.
"""

from __future__ import annotations

import argparse
from typing import Any

from protocol import MODES, Build, Engine, Request, Tokens, serve

DRAFTERS = {"greedy": "none", "ngram": "llma", "draft_model": "draft_model"}
DEFAULTS = {"backend": "ragged", "budget": "adaptive", "batching": "continuous"}


def load(arguments: argparse.Namespace) -> Build:
    import torch
    from omegaconf import OmegaConf

    from emssd.decoding.engine import Engine as Decoder
    from emssd.decoding.warmup import warm_up
    from emssd.hooks.registry import Registry
    from emssd.sequences import Request as Row

    torch.set_num_threads(arguments.threads)
    registry = Registry()
    chosen: dict[str, str] = DEFAULTS | DRAFTERS
    if arguments.device.startswith("cuda"):
        chosen |= {"backend": "flashinfer"}
    chosen |= dict(option.partition("=")[::2] for option in arguments.option)
    plain: Any = OmegaConf.to_container(
        OmegaConf.from_dotlist([f"{name}={value}" for name, value in chosen.items() if "." not in name])
    )

    def part(kind: str, name: str, **fixed: Any) -> Any:
        """The config of the plugin that option `name` chooses, with the options that begin with `name`."""
        values = [f"{key[len(name) + 1 :]}={value}" for key, value in chosen.items() if key.startswith(f"{name}.")]
        config = OmegaConf.structured(registry.find(kind, plain[name]).config(**fixed))
        return OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.from_dotlist(values)))

    def build(request: Request) -> Engine:
        # A drafter that is called for a draft model is given one, whatever its name.
        fixed = {"path": arguments.draft_model} if plain[request.mode] == "draft_model" else {}
        engine = Decoder.from_pretrained(
            arguments.model,
            drafter=part("drafter", request.mode, **fixed),
            backend=part("backend", "backend"),
            budget=part("budget", "budget"),
            dtype=arguments.dtype,
            device=arguments.device,
            batch_size=request.batch_size,
            on_drafter_error="fail",
            prefix_caching=False,  # repeats would find all of their prompts
            **{name: value for name, value in plain.items() if name not in (*MODES, "backend", "budget")},
        )
        eos = frozenset(request.eos)
        warm_up(engine, [Row(str(i), tuple(ids), request.max_new_tokens, eos) for i, ids in enumerate(request.prompts)])

        def generate(prompts: Tokens, new: int) -> Tokens:
            rows = [Row(str(i), tuple(ids), new, eos) for i, ids in enumerate(prompts)]
            done = {row.request_id: list(row.token_ids) for row in engine.run(rows)}
            return [done[str(i)] for i in range(len(prompts))]

        return Engine(generate, lambda: {"metrics": engine.report.metrics()})

    return build


if __name__ == "__main__":
    serve(load, ["emssd", "torch", "transformers"])
