"""The noise is a hash with the same bits everywhere, and its law is Gumbel's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.sampling.noise import gumbel, hashed, noise_key, noise_state
from tests.support import sampling as reference

CPU = torch.device("cpu")

WHERE = st.tuples(st.integers(-(2**70), 2**70), st.text(), st.integers(0, 2**40))


def state(seed: int, request_id: str, position: int) -> int:
    return noise_state(noise_key(seed, request_id), position)


@given(st.lists(WHERE, min_size=1, max_size=4), st.integers(1, 300))
def test_bits_are_those_of_the_hash_in_python(places: list[tuple[int, str, int]], vocab_size: int) -> None:
    found = hashed([state(*place) for place in places], vocab_size, CPU)
    assert found.tolist() == [[reference.hashed(*place, token) for token in range(vocab_size)] for place in places]


def test_bits_are_written_down() -> None:
    """So that a change of the hash, which would change every text, cannot go unseen."""
    assert noise_key(7, "a") == 0x490824F513A1AAA4
    assert noise_state(0x490824F513A1AAA4, 3) == 0x0420E940BAB6377B
    assert hashed([0x0420E940BAB6377B], 3, CPU).tolist() == [[3294546313, 2224496003, 1202606225]]


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_noise_is_that_of_python(state: int, token: int) -> None:
    found = gumbel([state], token + 1, CPU)[0, token]
    bits = int(hashed([state], token + 1, CPU)[0, token])
    assert found.dtype is torch.float64
    assert float(found) == pytest.approx(reference.gumbel(bits), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("bits", [0, 1, 2**32 - 2, 2**32 - 1])
def test_extreme_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emssd.sampling.noise.hashed", lambda *_: torch.tensor([[bits]]))
    assert float(gumbel([0], 1, CPU)) == pytest.approx(reference.gumbel(bits), rel=1e-9)
    assert math.isfinite(reference.gumbel(bits))


def test_seed_request_sample_position_and_token_all_count() -> None:
    keys = {
        noise_key(seed, name, sample)
        for seed in (0, 1, -1, 11)
        for name in ("", "0", "1", "é\ud800")
        for sample in (0, 1)
    }
    assert len(keys) == 4 * 4 * 2
    states = {noise_state(key, position) for key in keys for position in range(200)}
    assert len(states) == len(keys) * 200
    found = hashed(sorted(states)[:64], 500, CPU)
    assert len(set(found.flatten().tolist())) > 64 * 500 - 10  # by chance, two of 32,000 in 2^32 are equal


def test_noise_has_gumbels_law() -> None:
    """Over tokens, positions and seeds, by chi-squared: the shares in ten parts that are equally probable."""
    along_tokens = gumbel([noise_state(noise_key(0, "0"), 0)], 100_000, CPU)[0]
    along_positions = gumbel([noise_state(noise_key(0, "0"), position) for position in range(100_000)], 1, CPU)[:, 0]
    along_seeds = gumbel([noise_state(noise_key(seed, "0"), 9) for seed in range(100_000)], 4, CPU)[:, 3]
    for noise in (along_tokens, along_positions, along_seeds):
        counts = torch.histc(torch.exp(-torch.exp(-noise)), bins=10, min=0, max=1)
        assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 27.9  # one in a thousand; the seeds are fixed
