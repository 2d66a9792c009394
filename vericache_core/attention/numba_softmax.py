"""Scores of one row and page to softmax weights, as a Numba intrinsic in vector IR.

``soften`` works on the ``PAGE`` scores at an address: scale, hide what lies outside ``[begin, end)``, take two to the
power of the distance to the largest score so far. Eight vectors of sixteen lanes, folded in halves where one number
is wanted, so the order of every sum is fixed. The power is a polynomial of our own: a library call may differ by lane.

Scores are scaled by ``scaling * log2(e)``, so that powers of two are what the softmax needs.
"""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from vericache_core.attention.numba_tiles import F32S, I16, I32, I32S, LANES, PAIRS, VectorWriter

PARTS = 8
"""Vectors in a page of 128 scores."""
# Factors of r, r ** 2, ... in a polynomial for 2 ** r with r in [-0.5, 0.5] that is 1 for r = 0. Largest relative error 2e-9;
# 3e-6 in the second, for weights that are rounded to bfloat16 (4e-3) afterwards.
EXACT = (0.69314718, 0.24022648, 0.055503324, 0.0096184369, 0.0013398875, 0.00015353362)
_ROUGH = (0.69312418, 0.24024099, 0.055906426, 0.0095828529)
_LEAST = -126.0
"""Exponents below count as this one: the smallest normal float32."""
SHIFT = 1.5 * 2**23 + 127
"""Added to a small float32 it leaves, in the low bits, the nearest integer and the exponent's bias."""


def make_soften(*, rounded: bool) -> Any:
    """The compiled ``soften(scores, pairs, factor, begin, end, top) -> (new top, sum)``.

    ``scores`` and ``pairs`` are addresses. With ``rounded`` the weights go to ``pairs`` as bfloat16, to nearest even, and the
    sum is that of the rounded ones; otherwise they replace the scores.
    """
    result = types.UniTuple(types.float32, 2)

    @intrinsic  # type: ignore[untyped-decorator]
    def written(context: Any, scores: Any, pairs: Any, factor: Any, begin: Any, end: Any, top: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return _context.make_tuple(builder, result, _Softmax(builder).write(*arguments, rounded=rounded))

        return result(types.int64, types.int64, types.float32, types.int64, types.int64, types.float32), generate

    def soften(scores: Any, pairs: Any, factor: Any, begin: Any, end: Any, top: Any) -> Any:
        return written(scores, pairs, factor, begin, end, top)

    soften.__name__ = soften.__qualname__ = "soften_rounded" if rounded else "soften_exact"  # see make_tile
    return njit(error_model="numpy")(soften)


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(context: Any, exponent: Any) -> Any:
    """``2 ** exponent`` for a float32 of at most 0: what an earlier sum is worth under a new top."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        writer = _Softmax(builder)
        return writer.first(writer.power(writer.splat(arguments[0], F32S), EXACT))

    return types.float32(types.float32), generate


class _Softmax(VectorWriter):
    def write(self, scores: Any, pairs: Any, factor: Any, begin: Any, end: Any, top: Any, *, rounded: bool) -> list[Any]:
        """The usual page, all of which is seen, without masks: fewer instructions, same numbers."""
        builder, ways = self.builder, []
        first = builder.icmp_signed("==", begin, begin.type(0))
        whole = builder.and_(first, builder.icmp_signed("==", end, end.type(PARTS * LANES)))
        with builder.if_else(whole) as branches:
            for branch, masks in zip(branches, (None, (begin, end)), strict=True):
                with branch:
                    seen = [None] * PARTS if masks is None else self._between(*masks)
                    results = self._weights(scores, pairs, self.splat(factor, F32S), seen, top, rounded=rounded)
                    ways.append((results, builder.block))
        results = []
        for values in zip(*(values for values, _ in ways), strict=True):
            results.append(builder.phi(values[0].type))
            for value, (_, block) in zip(values, ways, strict=True):
                results[-1].add_incoming(value, block)
        return results

    def _weights(self, scores: Any, pairs: Any, scale: Any, seen: list[Any], top: Any, *, rounded: bool) -> list[Any]:
        builder = self.builder
        rows = [builder.fmul(self.load(scores, part * 64, F32S), scale) for part in range(PARTS)]
        rows = [self._only(mask, row, float("-inf")) for mask, row in zip(seen, rows, strict=True)]
        peak = self._larger(top, self._folded(rows, self._larger))
        high = self.splat(peak, F32S)
        powers = [self.power(builder.fsub(row, high), _ROUGH if rounded else EXACT) for row in rows]
        weights = [self._only(mask, weight, 0.0) for mask, weight in zip(seen, powers, strict=True)]
        if rounded:
            return [peak, self._store_rounded(weights, pairs)]
        for part, weight in enumerate(weights):
            self.store(weight, scores, part * 64)
        return [peak, self._folded(weights, builder.fadd)]

    def _only(self, mask: Any, vector: Any, other: float) -> Any:
        return vector if mask is None else self.builder.select(mask, vector, self.constant(other))

    def _between(self, begin: Any, end: Any) -> list[Any]:
        """A mask a part: the lanes of the page from ``begin`` to ``end``, not included."""
        masks = []
        for part in range(PARTS):
            lanes = ir.Constant(I32S, [part * LANES + lane for lane in range(LANES)])
            low, high = (self.splat(self.builder.trunc(bound, I32), I32S) for bound in (begin, end))
            over = self.builder.icmp_signed(">=", lanes, low)
            masks.append(self.builder.and_(over, self.builder.icmp_signed("<", lanes, high)))
        return masks

    def _larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def _folded(self, vectors: list[Any], join: Any) -> Any:
        """One number out of the vectors: halves onto halves, then lanes onto lanes."""
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [join(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
        value, lanes = vectors[0], LANES
        while lanes > 1:
            lanes //= 2
            order = [*range(lanes, 2 * lanes), *range(lanes, 2 * lanes)] * (LANES // (2 * lanes))
            moved = self.builder.shuffle_vector(value, value, ir.Constant(I32S, order[:LANES]))
            value = join(value, moved)
        return self.first(value)

    def first(self, vector: Any) -> Any:
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def power(self, x: Any, numbers: tuple[float, ...]) -> Any:
        """``2 ** x`` for ``x`` of at most 0; not-a-number stays what it is."""
        builder = self.builder
        x = self._larger(self.constant(_LEAST), x)
        shifted = builder.fadd(x, self.constant(SHIFT))
        r = builder.fsub(x, builder.fsub(shifted, self.constant(SHIFT)))
        y = self.constant(numbers[-1])
        for number in (*reversed(numbers[:-1]), 1.0):
            y = self.fma(y, r, self.constant(number))
        scale = builder.shl(builder.bitcast(shifted, I32S), self.whole(23))
        return builder.fmul(y, builder.bitcast(scale, F32S))

    def _store_rounded(self, weights: list[Any], pairs: Any) -> Any:
        """Weights as bfloat16, and their sum."""
        builder, total = self.builder, self.constant(0.0)
        convert = self.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, [F32S, F32S])
        ones = builder.bitcast(ir.Constant(ir.VectorType(I16, 2 * LANES), [0x3F80] * (2 * LANES)), PAIRS)
        for part in range(0, PARTS, 2):
            both = builder.call(convert, [weights[part + 1], weights[part]])
            self.store(builder.bitcast(both, I32S), pairs, part * 32)
            total = self.dot(total, both, ones)
        return self._folded([total], builder.fadd)
