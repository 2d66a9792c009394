"""Gumbel noise that depends on (seed, position) and nothing else.

Sampling by ``argmax(logits / T + gumbel(seed, t))`` draws exactly from ``softmax(logits / T)``, and it makes
the draw a pure function of the logits, the seed and the position: a drafter and a verifier that look at the
same position share the noise, so sampled output is as reproducible as greedy output. The generator is
counter-based (Philox 4x64), so position 1000 costs what position 0 costs, and no global state is touched.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
_CACHE_BYTES = 8 << 20
_CACHE_POSITIONS = 40  # more than the longest window, so a verify finds what its drafts left


def raw_bits(seed: int, position: int, count: int) -> npt.NDArray[np.uint64]:
    """The first ``count`` 64-bit words of the Philox stream with key ``(seed, position)``.

    Raises:
        ValueError: if seed or position does not fit in 64 unsigned bits.
    """
    if not (0 <= seed < 1 << 64 and 0 <= position < 1 << 64):
        raise ValueError(f"seed and position must be in [0, 2**64), got {seed} and {position}")
    return np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)


def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """Standard Gumbel noise for one token position.

    Args:
        seed: of the request, in ``[0, 2**64)``.
        position: index of the token among the generated ones, from 0.
        vocab: how many values.

    Returns:
        float32 ``[vocab]``, always finite; value ``i`` does not depend on ``vocab``.
    """
    # 52 bits and a half: exact in float64 and never 0 or 1, whose logarithms would be infinite.
    uniform = ((raw_bits(seed, position, vocab) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: Floats = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise


class NoiseCache:
    """`gumbel` of one seed, remembering the newest positions. The arrays are shared and read-only."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed, self._vocab = seed, vocab
        self._limit = max(2, min(_CACHE_POSITIONS, _CACHE_BYTES // (4 * max(1, vocab))))
        self._kept: OrderedDict[int, Floats] = OrderedDict()

    def at(self, position: int) -> Floats:
        """The noise of ``position``, float32 ``[vocab]``."""
        noise = self._kept.get(position)
        if noise is None:
            noise = self._kept[position] = gumbel(self._seed, position, self._vocab)
            noise.setflags(write=False)
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        return noise

    def check_integrity(self) -> None:
        """Raise AssertionError if the cache is larger than it may be or holds noise of the wrong shape."""
        assert len(self._kept) <= self._limit, "noise cache over its limit"
        assert all(noise.shape == (self._vocab,) for noise in self._kept.values()), "noise of the wrong shape"
