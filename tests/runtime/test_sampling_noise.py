"""Noise: counter-based, reproducible, and it draws from the right distribution."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from vericache_core.runtime.choose import TokenChooser
from vericache_core.runtime.noise import NoiseCache, gumbel, raw_bits
from vericache_core.runtime.processors import filter_logits
from vericache_core.runtime.sampling_params import SamplingParams

CHI_SQUARE_P001 = {3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322}  # upper 0.001 quantiles by degrees of freedom
GOLDEN_BITS_0_0 = [213000021201967259, 4455796210202625458, 2055444239878205049, 10411612076246414556]
GOLDEN_BITS_MAX = [15359563379988438401, 4119749603447811810, 13148334205545733943, 12241306032521038536]
GOLDEN_GUMBEL_7_3 = [0.31533506512641907, 1.130794644355774, -1.095495581626892, -0.14116239547729492]


def test_golden_values() -> None:
    """A change here changes every sampled output of every user."""
    assert raw_bits(0, 0, 4).tolist() == GOLDEN_BITS_0_0
    assert raw_bits(2**64 - 1, 12345, 4).tolist() == GOLDEN_BITS_MAX
    assert gumbel(7, 3, 4).tolist() == pytest.approx(GOLDEN_GUMBEL_7_3, rel=1e-6)


def test_depends_on_seed_and_position_only() -> None:
    torch.manual_seed(1)
    first = gumbel(5, 9, 100)
    np.random.default_rng(3).random(10)
    torch.manual_seed(2)
    torch.rand(10)
    assert np.array_equal(first, gumbel(5, 9, 100))
    assert np.array_equal(first[:40], gumbel(5, 9, 40))
    assert not np.array_equal(first, gumbel(5, 10, 100))
    assert not np.array_equal(first, gumbel(6, 9, 100))
    assert not np.array_equal(gumbel(1, 2, 100), gumbel(2, 1, 100))
    state = torch.get_rng_state()
    gumbel(5, 9, 100)
    assert torch.equal(state, torch.get_rng_state())


def test_same_in_threads_and_in_another_process() -> None:
    here = [gumbel(3, position, 50) for position in range(20)]
    with ThreadPoolExecutor(4) as pool:
        there = list(pool.map(lambda position: gumbel(3, position, 50), range(20)))
    assert all(map(np.array_equal, here, there))
    code = "from vericache_core.runtime.noise import gumbel; print(gumbel(3, 7, 50).tobytes().hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == here[7].tobytes().hex()


def test_always_finite_with_the_right_moments() -> None:
    noise = np.concatenate([gumbel(seed, 0, 100_000) for seed in range(5)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1)])
def test_out_of_range_is_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="seed and position"):
        gumbel(seed, position, 4)


def test_cache_returns_the_same_noise_and_stays_small() -> None:
    cache = NoiseCache(4, 1 << 20)
    for position in [0, 1, 2, 3, 2, 1, 0, 3]:
        assert np.array_equal(cache.at(position), gumbel(4, position, 1 << 20))
        cache.check_integrity()
    small = NoiseCache(4, 8)
    assert all(small.at(position) is small.at(position) for position in range(100))
    small.check_integrity()


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_draws_follow_the_filtered_softmax(top_p: float | None) -> None:
    """Chi-square over 20,000 draws from eight toy logits at T = 0.7, against the filtered softmax."""
    logits = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.0, -1.5, 1.2, -3.0])
    params = SamplingParams(temperature=0.7, top_p=top_p, seed=11)
    filtered = filter_logits(params, logits.numpy())
    draws = 20_000
    noise = np.stack([gumbel(params.seed, position, 8) for position in range(draws)])
    tokens = (filtered + noise).argmax(axis=-1)
    counts = np.bincount(tokens, minlength=8)
    expected = torch.softmax(torch.from_numpy(filtered).double(), dim=-1).numpy() * draws
    allowed = expected > 0
    assert counts[~allowed].sum() == 0
    statistic = float(((counts - expected)[allowed] ** 2 / expected[allowed]).sum())
    assert statistic < CHI_SQUARE_P001[int(allowed.sum()) - 1]
    chooser = TokenChooser(params, [0], [], 8)
    assert [chooser.choose(logits, [0] * position).token for position in range(200)] == tokens[:200].tolist()
