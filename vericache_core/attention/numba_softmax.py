"""Scores of one row and page to softmax weights, as a Numba intrinsic in vector IR.

``soften`` works in place on the ``PAGE`` scores at an address: scale, hide what lies outside ``[begin, end)``, take the
exponential of the distance to the largest score so far. Eight vectors of sixteen lanes, folded in halves where one number
is wanted, so the order of every sum is fixed. ``exp`` is Cephes' ``expf`` written out: a library call may differ by lane.
"""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from vericache_core.attention.numba_tiles import F32S, I16S, I32S, LANES, VectorWriter

PARTS = 8
"""Vectors in a page of 128 scores."""


def make_soften(*, rounded: bool) -> Any:
    """The intrinsic ``soften(scores, pairs, scaling, begin, end, top) -> (new top, factor for what came before, sum)``.

    ``scores`` and ``pairs`` are addresses. With ``rounded`` the weights are rounded to bfloat16, to nearest even; the sum is
    that of the rounded ones, and ``pairs`` gets them as bfloat16. Otherwise ``pairs`` is not touched.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def soften(context: Any, scores: Any, pairs: Any, scaling: Any, begin: Any, end: Any, top: Any) -> Any:
        result = types.UniTuple(types.float32, 3)

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            parts = _Softmax(builder).write(*arguments, rounded=rounded)
            return _context.make_tuple(builder, result, parts)

        return result(types.int64, types.int64, types.float32, types.int64, types.int64, types.float32), generate

    return soften


class _Softmax(VectorWriter):
    def write(self, scores: Any, pairs: Any, scaling: Any, begin: Any, end: Any, top: Any, *, rounded: bool) -> list[Any]:
        builder = self.builder
        factor, nothing = self.splat(scaling, F32S), self.constant(float("-inf"))
        seen, rows = [], []
        for part in range(PARTS):
            lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), [part * LANES + lane for lane in range(LANES)])
            low = builder.icmp_signed(">=", lanes, self.splat(begin, lanes.type))
            seen.append(builder.and_(low, builder.icmp_signed("<", lanes, self.splat(end, lanes.type))))
            scaled = builder.fmul(self.load(scores, part * 64, F32S), factor)
            rows.append(builder.select(seen[part], scaled, nothing))
        peak = self._larger(top, self._folded(rows, self._larger))
        high = self.splat(peak, F32S)
        weights = []
        for part, row in enumerate(rows):
            weight = builder.select(seen[part], self._exp(builder.fsub(row, high)), self.constant(0.0))
            if rounded:
                weight = self._round(weight, pairs, part)
            builder.store(weight, self.pointer(scores, part * 64, F32S), align=4)
            weights.append(weight)
        decay = self._first(self._exp(self.splat(builder.fsub(top, peak), F32S)))
        return [peak, decay, self._folded(weights, builder.fadd)]

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
        return self._first(value)

    def _first(self, vector: Any) -> Any:
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def _exp(self, x: Any) -> Any:
        builder = self.builder
        least = self.constant(-87.0)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)  # not-a-number stays what it is
        n = builder.call(
            self.function("llvm.floor.v16f32", F32S, [F32S]), [self.fma(x, self.constant(1.44269504), self.constant(0.5))]
        )
        r = self.fma(n, self.constant(-0.693359375), x)
        r = self.fma(n, self.constant(2.12194440e-4), r)
        y = self.constant(1.9875691500e-4)
        for number in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, self.constant(number))
        y = builder.fadd(self.fma(builder.fmul(y, r), r, r), self.constant(1.0))
        known = builder.select(builder.fcmp_ordered("==", n, n), n, self.constant(0.0))
        power = builder.add(builder.fptosi(known, I32S), self.whole(127))
        return builder.fmul(y, builder.bitcast(builder.shl(power, self.whole(23)), F32S))

    def _round(self, weight: Any, pairs: Any, part: int) -> Any:
        builder = self.builder
        bits = builder.bitcast(weight, I32S)
        odd = builder.and_(builder.lshr(bits, self.whole(16)), self.whole(1))
        bits = builder.lshr(builder.add(builder.add(bits, self.whole(0x7FFF)), odd), self.whole(16))
        builder.store(builder.trunc(bits, I16S), self.pointer(pairs, part * 32, I16S), align=2)
        return builder.bitcast(builder.shl(bits, self.whole(16)), F32S)
