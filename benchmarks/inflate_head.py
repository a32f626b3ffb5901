"""Makes an EAGLE-3 head for a large target out of one for a small target that says the same.

    emssd-train eagle3 --model SMALL --data prompts.jsonl --output HEAD
    python benchmarks/inflate_head.py HEAD SMALL LARGE OUT

Both heads draft the same. The large target's residual stream begins with the small one's and goes on with zeros. Layer
``i`` of `l` is its layer ``round(i * L / l)`` of `L`, and other layers add nothing. Further tokens repeat the first.
The head stays as narrow as it is, so it gets embeddings and a vocabulary projection of its own. Its `fc` reads the
wider states; new columns are random, and multiplied by those zeros.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from emssd_eagle3.loading import load_eagle3
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from emssd.drafters import TargetSizes
from emssd.model import BorrowedTarget, ModelOptions, load_model
from emssd_train.eagle3 import unroll
from emssd_train.shared import Teacher

Tensors = dict[str, torch.Tensor]
TABLES = ("embed_tokens.weight", "lm_head.weight")


def inflated(
    config: dict[str, Any], weights: Tensors, tables: Tensors, small: TargetSizes, large: TargetSizes
) -> tuple[dict[str, Any], Tensors]:
    """The config and the weights of a head for `large`.

    Args:
        config, weights: of a head for `small`, as ``emssd-train`` saves them.
        tables: the small target's, by the names of `TABLES`; a head without such a table borrows it.
    """
    states = weights["fc.weight"].unflatten(1, (-1, small.hidden_size))
    wide = torch.randn(*states.shape[:2], large.hidden_size).to(states) * states.std()
    wide[..., : small.hidden_size] = states
    embeds, rows = (weights.get(name, tables[name]).to(states) for name in TABLES)
    offsets = weights.get("d2t", torch.zeros(len(rows), dtype=torch.int64))
    drafted = offsets + torch.arange(len(offsets))
    grown = weights | {
        "fc.weight": wide.flatten(1),
        "embed_tokens.weight": embeds[torch.arange(large.vocab_size) % len(embeds)],
        "lm_head.weight": rows if len(rows) == len(drafted) else rows[drafted],
        "d2t": offsets,
        "t2d": torch.zeros(large.vocab_size, dtype=torch.bool).index_fill_(0, drafted, True),
    }
    layers = [round(each * large.num_layers / small.num_layers) for each in config["eagle_aux_hidden_state_layer_ids"]]
    decoder = config["transformer_layer_config"] | {"vocab_size": large.vocab_size}
    new = {"eagle_aux_hidden_state_layer_ids": layers, "transformer_layer_config": decoder}
    return config | new | {"target_hidden_size": large.hidden_size}, grown


def sizes(model: str) -> TargetSizes:
    """The sizes of a target."""
    config = AutoConfig.from_pretrained(model)
    return TargetSizes(config.vocab_size, config.hidden_size, config.num_hidden_layers)


@torch.no_grad()
def logits_of(model: str, path: str, ids: torch.Tensor, depth: int = 3) -> torch.Tensor:
    """``[depth, m, tokens]`` the logits of a head that reads the texts ``ids [b, n]``, and then its own drafts."""
    target, _ = load_model(ModelOptions(model, dtype="float32", device="cpu", compile=False))
    loaded, borrowed = load_eagle3(path, sizes(model)), BorrowedTarget(target)
    features = loaded.head.features(Teacher(target, loaded.layers)(ids).hidden[:, :-1])
    passes = unroll(loaded.head, loaded.head.embed(ids[:, 1:], borrowed.embed), features, depth)
    return torch.stack([loaded.head.logits(each[:, depth:].flatten(0, 1), borrowed.project) for each in passes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("head", "small", "large", "out"):
        parser.add_argument(name)
    args = parser.parse_args()
    torch.manual_seed(0)
    small, large, out = sizes(args.small), sizes(args.large), Path(args.out)
    model = load_model(ModelOptions(args.small, dtype="float32", device="cpu", compile=False))[0].model
    tables = [table.weight.detach() for table in (model.get_input_embeddings(), model.get_output_embeddings())]
    config = json.loads((Path(args.head) / "config.json").read_text(encoding="utf-8"))
    weights = load_file(Path(args.head) / "model.safetensors")
    config, weights = inflated(config, weights, dict(zip(TABLES, tables, strict=True)), small, large)
    out.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in weights.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ids = torch.randint(3, small.vocab_size, (2, 40))
    want, got = logits_of(args.small, args.head, ids), logits_of(args.large, args.out, ids)
    print(f"largest difference of logits {(want - got).abs().max():.1e} of {want.abs().max():.1f}")
    assert torch.equal(want.argmax(-1), got.argmax(-1)), "the drafts differ"


if __name__ == "__main__":
    main()
