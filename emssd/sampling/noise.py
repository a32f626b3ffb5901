"""Gumbel noise that is a hash of (seed, request, sample, position, token): the same on every device, in any order.

``argmax(log p + G)`` is a draw from ``p`` (the Gumbel-max trick). With `G` a pure function of where a token stands, the
draw does not depend on what was drafted, on the other rows of a batch, or on when the row was computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from hashlib import blake2b

import torch

from emssd.attention.packed import on_device

__all__ = ["exponentials", "gumbel", "hash_of", "noise_key", "noise_state"]

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1

# Multipliers modulo 2^32, taken from -2^31 to 0: a product with 32 bits then stays within an int64.
_WEYL = 0x9E3779B9 - 2**32
_FMIX_1 = 0x85EBCA6B - 2**32
_FMIX_2 = 0xC2B2AE35 - 2**32


@lru_cache(maxsize=2**14)  # rows ask for it in every step
def noise_key(seed: int, request_id: str, sample: int = 0) -> int:
    """64 bits for one sample of one request, from BLAKE2b of their text. The seed and the id may be any."""
    return hash_of(f"{seed}/{sample}/{request_id}")


def noise_state(key: int, position: int) -> int:
    """64 bits for one position of a row: ``splitmix64(key ^ splitmix64(position))``."""
    return _splitmix64(key ^ _splitmix64(position))


def hashed(states: Seq[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """``[r, vocab]`` int64, 32 random bits for each token under each of `states`, see `noise_state`.

    Murmur3's finalizer, twice: ``fmix32(fmix32(token * 0x9E3779B9 + low) ^ high)`` with the two halves of a state.
    """
    halves = [state & _MASK_32 for state in states] + [state >> 32 for state in states]
    low, high = on_device(halves, device).view(2, len(states), 1)
    tokens = torch.arange(vocab_size, device=device)
    bits = _fmix32((tokens * _WEYL + low) & _MASK_32)
    return _fmix32(bits ^ high)


def gumbel(states: Seq[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """``[r, vocab]`` float64 Gumbel noise: ``-log(-log(u))``, ``u`` being the middle of one of 2^32 equal intervals."""
    return exponentials(states, vocab_size, device).log_().neg_()


def exponentials(states: Seq[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """``[r, vocab]`` float64 standard exponentials: ``-log(u)`` with `u` as in `gumbel`."""
    return hashed(states, vocab_size, device).double().add_(0.5).mul_(2.0**-32).log_().neg_()


def hash_of(text: str) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _fmix32(bits: torch.Tensor) -> torch.Tensor:
    """Murmur3's finalizer of 32 bits in int64; works in the memory of `bits`."""
    bits ^= bits >> 16
    bits.mul_(_FMIX_1).bitwise_and_(_MASK_32)
    bits ^= bits >> 13
    bits.mul_(_FMIX_2).bitwise_and_(_MASK_32)
    bits ^= bits >> 16
    return bits


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
