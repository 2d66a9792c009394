"""Lloyd-Max codebooks for one coordinate of a random unit vector."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

GRID = 200_001


@lru_cache(maxsize=64)
def lloyd_max(dim: int, bits: int) -> tuple[float, ...]:
    """The ``2**bits`` ascending centroids that minimise the mean squared error.

    TurboQuant section 3.1: a coordinate of a uniform unit vector of dimension ``dim`` has density proportional
    to ``(1 - t*t) ** ((dim - 3) / 2)`` on [-1, 1]. Lloyd's iteration runs to convergence in float64; the
    partial mean is in closed form, the distribution function a cumulative sum over a fine grid. The result is
    symmetric to the last bit.

    Args:
        dim: dimension of the vectors, at least 4.
        bits: 1 to 8.
    """
    if dim < 4:
        raise ValueError(f"codebooks need a dimension of at least 4, got {dim}")
    reach = min(1.0, 12 / math.sqrt(dim))  # beyond 12 standard deviations the density underflows
    grid = np.linspace(-reach, reach, GRID)
    inside = np.maximum(1 - grid * grid, 0.0)
    density = inside ** ((dim - 3) / 2)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)]) * (grid[1] - grid[0])
    # The integral of t * (1 - t*t) ** ((dim - 3) / 2) is -(1 - t*t) ** ((dim - 1) / 2) / (dim - 1).
    mean_below = -(inside ** ((dim - 1) / 2)) / (dim - 1)

    def between(table: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.diff(np.interp(edges, grid, table))

    count = 1 << bits
    centroids = np.interp((np.arange(count) + 0.5) / count, below / below[-1], grid)  # start from the quantiles
    for _ in range(20_000):
        edges = np.concatenate([[-reach], (centroids[1:] + centroids[:-1]) / 2, [reach]])
        moved = between(mean_below, edges) / between(below, edges)
        moved = (moved - moved[::-1]) / 2
        done = np.abs(moved - centroids).max() < 1e-12
        centroids = moved
        if done:
            break
    return tuple(float(centroid) for centroid in centroids)
