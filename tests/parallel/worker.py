"""One process of a tensor parallel run, started by torchrun: decodes every case, and process 0 writes the tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from emssd.decoding.parallel import follow_unless_first
from emssd.model import load_model
from emssd.plugins.registry import Registry
from tests.parallel.cases import MODELS, SAMPLING, backends, cases, decoded, drafter


def main(folder: Path) -> None:
    follow_unless_first(Registry())
    choices, found = backends(), dict[str, list[list[int]]]()
    for model in MODELS:
        loaded = load_model(str(folder / f"{model}-0"), tensor_parallel=True, checksums=True)
        for name, backend, sampling in cases(model):
            made = drafter(name, str(folder / model))
            found[f"{model} {name} {backend} {sampling}"] = decoded(loaded, made, choices[backend], SAMPLING[sampling])
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
