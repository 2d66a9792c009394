"""Sixteen packed codes at a time, as Numba intrinsics in vector IR: what ``numba_decode.py`` makes panels from.

``spread`` writes ``code * scale + low`` as float32. ``look_up`` writes pairs of bfloat16, what two runs of codes hold in one
place side by side, out of a table of 32 bfloat16, 16 numbers for either run: so scale and low are multiplied and rounded once
for each number that a code of the group may stand for, and not once for each code.
"""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from vericache_core.attention.numba_products import HAVE_DOT
from vericache_core.attention.numba_tiles import F32S, I16, I32, I32S, LANES, PAIRS, VectorWriter

_I16_PAIRS = ir.VectorType(I16, 2 * LANES)
_I8, _EIGHT = ir.IntType(8), ir.VectorType(ir.IntType(64), 8)
_I64S = ir.VectorType(ir.IntType(64), LANES)
_OTHER_HALF = 0x00100000
"""In a pair of indices: the second number is one of the upper 16."""


class _CodeWriter(VectorWriter):
    def codes(self, address: Any, bits: int) -> Any:
        """Sixteen codes at ``address``, ``2 * bits`` bytes and no more, as words."""
        builder = self.builder
        if bits == 8:
            return builder.zext(self.load(address, 0, ir.VectorType(ir.IntType(8), LANES)), I32S)
        if bits == 3:  # codes that lie across bytes
            word = self._splat64(builder.zext(self.load(address, 0, ir.IntType(48)), ir.IntType(64)))
            shifted = builder.lshr(word, ir.Constant(_I64S, [3 * lane for lane in range(LANES)]))
            words = builder.trunc(shifted, I32S)
        else:
            chunks = self.load(address, 0, ir.VectorType(I16, bits))
            spread = builder.shuffle_vector(chunks, chunks, ir.Constant(I32S, [lane * bits // 16 for lane in range(LANES)]))
            words = builder.lshr(builder.zext(spread, I32S), self._shifts(bits))
        return builder.and_(words, self.whole((1 << bits) - 1))

    def code_pairs(self, one: Any, other: Any, bits: int) -> Any:
        """Sixteen codes of either address, side by side, as words."""
        builder, mask = self.builder, (1 << bits) - 1
        if bits == 3:
            return builder.or_(self.codes(one, 3), builder.shl(self.codes(other, 3), self.whole(16)))
        chunks = [self.load(address, 0, ir.VectorType(I16, bits)) for address in (one, other)]
        order = [lane * bits // 16 + run * bits for lane in range(LANES) for run in range(2)]
        both = builder.shuffle_vector(*chunks, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
        words = builder.lshr(builder.bitcast(both, I32S), self._shifts(bits))
        return builder.and_(words, self.whole(mask << 16 | mask))

    def pair_table(self, base: Any, scale: Any, low: Any, other_scale: Any, other_low: Any) -> Any:
        """``base[code] * scale + low`` of either run, rounded to bfloat16: 16 numbers of the one, 16 of the other."""
        numbers, runs = self.load(base, 0, F32S), ((scale, low), (other_scale, other_low))
        first, second = (self.fma(numbers, self.splat(factor, F32S), self.splat(least, F32S)) for factor, least in runs)
        convert = self.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, [F32S, F32S])
        return self.builder.bitcast(self.builder.call(convert, [second, first]), _I16_PAIRS)

    def across(self, bits: int, first: Any, step: Any, base: Any, target: Any, target_step: Any) -> None:
        """Eight bytes of each of sixteen rows of codes, turned on their side: see :func:`look_across`."""
        builder, halves = self.builder, []
        for half in range(2):
            words: Any = ir.Constant(_EIGHT, ir.Undefined)
            for row in range(8):
                place = builder.add(first, builder.mul(step, ir.Constant(step.type, half * 8 + row)))
                words = builder.insert_element(words, self.load(place, 0, _EIGHT.element), ir.Constant(I32, row))
            halves.append(builder.bitcast(words, ir.VectorType(_I8, 64)))
        numbers = self.load(base, 0, F32S)
        convert = self.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, [F32S, F32S])
        table = builder.bitcast(builder.call(convert, [numbers, numbers]), _I16_PAIRS)
        choose = self.function("llvm.x86.avx512.permvar.hi.512", _I16_PAIRS, [_I16_PAIRS] * 2)
        mask = (1 << bits) - 1
        for column in range(8):
            order = ir.Constant(I32S, [row * 8 + column for row in range(LANES)])
            byte = builder.zext(builder.shuffle_vector(*halves, order), I32S)
            for pair in range(4 // bits):
                low = builder.lshr(byte, self.whole(2 * bits * pair))
                both = builder.or_(low, builder.shl(low, self.whole(16 - bits)))
                index = builder.bitcast(builder.and_(both, self.whole(mask << 16 | mask)), _I16_PAIRS)
                row_of = builder.mul(target_step, ir.Constant(target_step.type, column * 4 // bits + pair))
                self.store(builder.bitcast(builder.call(choose, [table, index]), I32S), builder.add(target, row_of), 0)

    def _shifts(self, bits: int) -> Any:
        return ir.Constant(I32S, [lane * bits % 16 for lane in range(LANES)])

    def _splat64(self, value: Any) -> Any:
        nothing = ir.Constant(_I64S, ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(I32S, [0] * LANES))


def _make_look_across(bits: int) -> Any:
    """Codes of 1, 2 or 4 bits: a byte holds whole pairs."""

    @intrinsic  # type: ignore[untyped-decorator]
    def written(context: Any, rows: Any, step: Any, base: Any, to: Any, to_step: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            writer, (first, row_step, numbers, target, target_step) = _CodeWriter(builder), arguments
            writer.across(bits, first, row_step, numbers, target, target_step)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    def look_across(rows: Any, step: Any, base: Any, target: Any, target_step: Any) -> None:
        written(rows, step, base, target, target_step)

    look_across.__name__ = look_across.__qualname__ = f"look_across_{bits}"
    return njit(error_model="numpy")(look_across)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _no_look_across(rows: Any, step: Any, base: Any, target: Any, target_step: Any) -> None:
    """As :func:`_no_look_up`."""


def _make_spread(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def written(context: Any, codes: Any, scale: Any, low: Any, target: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            writer, (address, factor, least, place) = _CodeWriter(builder), arguments
            numbers = builder.uitofp(writer.codes(address, bits), F32S)
            writer.store(writer.fma(numbers, writer.splat(factor, F32S), writer.splat(least, F32S)), place, 0)
            return _context.get_dummy_value()

        return types.void(types.int64, types.float32, types.float32, types.int64), generate

    def spread(codes: Any, scale: Any, low: Any, target: Any) -> None:
        written(codes, scale, low, target)

    spread.__name__ = spread.__qualname__ = f"spread_{bits}"  # see make_tile
    return njit(error_model="numpy")(spread)


def _make_look_up(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def written(
        context: Any, one: Any, other: Any, base: Any, scale: Any, low: Any, other_scale: Any, other_low: Any, to: Any, end: Any
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            writer, (first, second, ramp, *factors, target, final) = _CodeWriter(builder), arguments
            table = writer.pair_table(ramp, *factors)
            choose = writer.function("llvm.x86.avx512.permvar.hi.512", _I16_PAIRS, [_I16_PAIRS] * 2)
            before, body, done = builder.block, builder.append_basic_block("run"), builder.append_basic_block("done")
            builder.branch(body)
            builder.position_at_end(body)
            places = [builder.phi(first.type) for _ in range(3)]
            index = builder.or_(writer.code_pairs(places[0], places[1], bits), writer.whole(_OTHER_HALF))
            found = builder.call(choose, [table, builder.bitcast(index, _I16_PAIRS)])
            writer.store(builder.bitcast(found, I32S), places[2], 0)
            steps = (2 * bits, 2 * bits, 4 * LANES)
            for place, start, step in zip(places, (first, second, target), steps, strict=True):
                place.add_incoming(start, before)
                place.add_incoming(builder.add(place, ir.Constant(place.type, step)), body)
            further = builder.icmp_signed("<", places[2].incomings[1][0], final)
            builder.cbranch(further, body, done)
            builder.position_at_end(done)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 3, *[types.float32] * 4, *[types.int64] * 2), generate

    def look_up(one: Any, other: Any, base: Any, factors: Any, target: Any, end: Any) -> None:
        written(one, other, base, factors[0], factors[1], factors[2], factors[3], target, end)

    look_up.__name__ = look_up.__qualname__ = f"look_up_{bits}"
    return njit(error_model="numpy")(look_up)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _no_look_up(one: Any, other: Any, base: Any, factors: Any, target: Any, end: Any) -> None:
    """The name must exist where bfloat16 pairs do not, and is never called."""


_spread_1, _spread_2, _spread_3, _spread_4, _spread_8 = (_make_spread(bits) for bits in (1, 2, 3, 4, 8))
_look_up_1, _look_up_2, _look_up_3, _look_up_4 = (_make_look_up(bits) if HAVE_DOT else _no_look_up for bits in (1, 2, 3, 4))

_make_across = _make_look_across if HAVE_DOT else lambda _: _no_look_across
_look_across_1, _look_across_2, _look_across_4 = (_make_across(bits) for bits in (1, 2, 4))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def spread(bits: Any, codes: Any, scale: Any, low: Any, target: Any) -> None:
    """Sixteen float32 at ``target`` from the codes at ``codes``: addresses both."""
    if bits == 4:
        _spread_4(codes, scale, low, target)
    elif bits == 2:
        _spread_2(codes, scale, low, target)
    elif bits == 3:
        _spread_3(codes, scale, low, target)
    elif bits == 1:
        _spread_1(codes, scale, low, target)
    else:
        _spread_8(codes, scale, low, target)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def look_up(bits: Any, one: Any, other: Any, base: Any, factors: Any, target: Any, end: Any) -> None:
    """Words from ``target`` to ``end``, at least sixteen, from the codes at ``one`` and ``other``: addresses all.

    Codes have at most 4 bits. A word is a pair of bfloat16: ``base[code] * scale + low`` of either run, rounded. ``base`` is
    the address of sixteen float32, ``factors`` are scale and low of one run, then of the other.
    """
    if bits == 4:
        _look_up_4(one, other, base, factors, target, end)
    elif bits == 2:
        _look_up_2(one, other, base, factors, target, end)
    elif bits == 3:
        _look_up_3(one, other, base, factors, target, end)
    else:
        _look_up_1(one, other, base, factors, target, end)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def look_across(bits: Any, rows: Any, step: Any, base: Any, target: Any, target_step: Any) -> None:
    """Sixteen rows of codes of 1, 2 or 4 bits, eight bytes of each, turned on their side.

    ``rows`` and ``target`` are addresses, the others' steps in bytes: a row of the target gets what one pair of
    neighbouring codes stands for in each of the sixteen rows, ``base[code]`` rounded to bfloat16.
    """
    if bits == 4:
        _look_across_4(rows, step, base, target, target_step)
    elif bits == 2:
        _look_across_2(rows, step, base, target, target_step)
    else:
        _look_across_1(rows, step, base, target, target_step)
