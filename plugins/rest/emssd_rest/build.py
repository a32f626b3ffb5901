"""Makes a datastore from lists of token ids. A store that is not complete is never left where it would be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from emssd.errors import ConfigError, OutputError
from emssd_rest.store import HEADER, SUFFIXES, TOKENS, Header, fingerprint, join_documents

__all__ = ["build_store"]


def build_store(
    folder: str | Path, documents: Iterable[Seq[int]], *, tokenizer: Any = None, sources: Seq[str] = ()
) -> Header:
    """Make the store `folder`. It appears there when it is complete; until then it grows beside it.

    Args:
        documents: token ids of each document; no draft runs from one into the next. Empty ones are left out.
        tokenizer: what made the ids. A target with another tokenizer refuses the store. Without it, every target
            with a large enough vocabulary takes the store.
    """
    target = Path(folder).expanduser()
    _sorter()  # before any work
    if target.exists():
        raise OutputError(f"{target} exists already; remove it, or give the store another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as beside:
            (unfinished := Path(beside) / "store").mkdir()
            tokens, header = join_documents(documents)
            header = replace(header, sources=tuple(sources))
            if tokenizer is not None:
                header = replace(header, vocab_size=len(tokenizer), tokenizer=fingerprint(tokenizer))
            np.save(unfinished / TOKENS, tokens)
            np.save(unfinished / SUFFIXES, suffix_array(tokens))
            (unfinished / HEADER).write_text(header.to_json(), encoding="utf-8")
            unfinished.rename(target)
    except OSError as error:
        raise OutputError(f"store {target} cannot be written: {error.strerror or error}") from error
    return header


def suffix_array(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Places of `tokens` ``[n]`` in the order of the suffixes that begin there, int32, or int64 where that is needed.

    A suffix comes before those that it begins.
    """
    order: npt.NDArray[Any] = _sorter()(tokens.astype(tokens.dtype.newbyteorder("=")))
    return order.astype(np.int32 if len(tokens) <= np.iinfo(np.int32).max else np.int64, copy=False)


def _sorter() -> Any:
    """The function that sorts suffixes. Nothing else needs its library."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise ConfigError(
            f"building a store needs the package 'pydivsufsort' ({error}): pip install 'emssd[rest]'. "
            f"A store that is already built is used without it"
        ) from error
    return divsufsort
