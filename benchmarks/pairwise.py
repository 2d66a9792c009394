"""A small set of cells in which every pair of levels of any two factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], at_least: int = 0, seed: int = 0) -> list[Cell]:
    """Greedy covering: each added cell is the best of many drawn ones at covering pairs still missing.

    Args:
        factors: levels by factor.
        at_least: cells to return at least; beyond the covering ones they are drawn.
        seed: of the drawing; the result is the same for the same arguments.
    """
    draw = random.Random(seed)  # noqa: S311 (not for secrets)
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    cells: list[dict[str, int]] = []
    while missing or len(cells) < at_least:
        target = next(iter(sorted(missing)), None)
        best: dict[str, int] = {}
        gain = -1
        for _ in range(60):
            cell = {name: draw.randrange(len(factors[name])) for name in names}
            if target is not None:
                cell |= dict(target)
            covered = len(missing & _pairs(cell, names))
            if covered > gain:
                best, gain = cell, covered
        missing -= _pairs(best, names)
        cells.append(best)
    return [{name: factors[name][index] for name, index in cell.items()} for cell in cells]


def _pairs(cell: Mapping[str, int], names: Sequence[str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return {((a, cell[a]), (b, cell[b])) for a, b in itertools.combinations(names, 2)}
