"""Trains the embedded pair anew: ``python -m benchmarks.demo --out DIR``.

The text is the documentation that the running Python carries, so the same weights come only from the same
seed, Python version, library versions and number of threads; TRAINING.json says which they were.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from benchmarks.demo.fit import Shape, build_model, fit, token_rows, train_tokenizer
from emssd.data.demo.corpus import RESTATE_LENGTH, Document, digest, documents, passage_of, restate_prompt

_VOCAB_SIZE = 2048
# The target is deep rather than wide: at this size a pass costs what its number of kernels costs.
_SHAPES = {"target": Shape(192, 6, 3), "draft": Shape(192, 1, 3)}


def main(argv: Seq[str] | None = None) -> None:
    """Train tokenizer, target and draft, and write them with a TRAINING.json to the folder of ``--out``."""
    args = _arguments(argv)
    began = time.perf_counter()
    torch.set_num_threads(args.threads)
    docs = documents()
    tokenizer = train_tokenizer(("\n\n".join(doc.paragraphs) for doc in docs), _VOCAB_SIZE)
    steps = {"target": args.steps, "draft": args.draft_steps}
    losses = {}
    for name in _SHAPES:
        model, losses[name] = _train(name, docs, tokenizer, steps[name], args)
        _save(model, tokenizer, args.out / name)
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "corpus_sha256": digest(docs),
        "seed": args.seed,
        "threads": args.threads,
        "rows_per_step": args.rows,
        "steps": steps,
        "final_losses": {name: round(loss, 4) for name, loss in losses.items()},
        "wall_seconds": round(time.perf_counter() - began),
    }
    (args.out / "TRAINING.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


def _arguments(argv: Seq[str] | None) -> Any:
    description = "Train the embedded pair from Python's own documentation."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the models and TRAINING.json")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1100, help="for the target (default: %(default)s)")
    parser.add_argument("--draft-steps", type=int, default=450, help="for the draft (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of 512 tokens, in a step (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser.parse_args(argv)


def _train(
    name: str, docs: Seq[Document], tokenizer: transformers.PreTrainedTokenizerFast, steps: int, args: Any
) -> tuple[transformers.OPTForCausalLM, float]:
    """A trained model and its final loss; what one model draws does not depend on the other."""
    torch.manual_seed(args.seed)
    model = build_model(_SHAPES[name], tokenizer)
    rows = token_rows(_training_texts(docs, Random(f"{name} {args.seed}")), tokenizer)
    return model, fit(model, rows, steps=steps, rows_per_step=args.rows, label=name)


def _training_texts(docs: Seq[Document], rng: Random) -> Iterator[str]:
    """Texts without end: the rest of a document from some paragraph on, or a passage and its restatement."""
    starts = [doc.starts for doc in docs]
    sizes = [len(doc.paragraphs) for doc in docs]
    prose = [texts for doc in docs if len(texts := doc.prose) >= 2]
    pool = sorted({paragraph for texts in prose for paragraph in texts})
    while True:
        if rng.random() < 0.5:
            (chosen,) = rng.choices(range(len(docs)), sizes)
            # Beginnings would be rare otherwise: one start of a document shows them, but many show its end.
            start = 0 if rng.random() < 0.3 else rng.choice(starts[chosen])
            yield "\n\n".join(docs[chosen].paragraphs[start:])
            continue
        size = rng.choice(RESTATE_LENGTH)
        if rng.random() < 0.7:
            paragraphs = rng.choice(prose)
            passage = passage_of(paragraphs, rng.randrange(len(paragraphs) - 1), size)
        else:
            # Paragraphs that do not belong together: what comes next has to be read off the passage.
            passage = passage_of(rng.sample(pool, 8), 0, size)
        yield "\n\n".join((restate_prompt(passage), *passage))


def _save(model: transformers.OPTForCausalLM, tokenizer: transformers.PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer. Weights are stored in float16 to save space; the config asks for float32."""
    weights = {name: value.to(torch.float16) for name, value in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embeddings
    model.save_pretrained(folder, state_dict=weights)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private; installed files must not be
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
