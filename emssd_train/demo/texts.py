"""The texts to train on: continuations of the documentation, and passages with their restatements."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from random import Random

from emssd.data.demo.corpus import RESTATE_LENGTH, Document, passage_of, restate_prompt

__all__ = ["training_texts"]


def training_texts(docs: Seq[Document], rng: Random) -> Iterator[str]:
    """Texts without end: the rest of a document from some paragraph on, or a passage and its restatement."""
    starts = [doc.starts for doc in docs]
    sizes = [len(doc.paragraphs) for doc in docs]
    prose = [found for doc in docs if len(found := doc.prose) >= 2]
    pool = sorted({paragraph for found in prose for paragraph in found})
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
