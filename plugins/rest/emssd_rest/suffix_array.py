"""Sorts all suffixes of a text of integers, with a library that is needed for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from emssd.errors import ConfigError

__all__ = ["load_sorter", "suffix_array"]


def load_sorter() -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    """The library's function.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise ConfigError(
            f"building a store needs the package 'pydivsufsort' ({error}): pip install 'emssd[rest]'. "
            f"A store that is already built is used without it"
        ) from error
    sorter: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = divsufsort
    return sorter


def suffix_array(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Places of `tokens` in the order of the suffixes that begin there; a suffix comes before those that it begins.

    Args:
        tokens: ``[n]`` unsigned integers.

    Returns:
        ``[n]`` int32, or int64 where that is needed.

    Raises:
        ConfigError: as `load_sorter`.
    """
    order = load_sorter()(tokens.astype(tokens.dtype.newbyteorder("=")))
    return order.astype(np.int32 if len(tokens) <= np.iinfo(np.int32).max else np.int64, copy=False)
