"""Register tiles of a matrix product as Numba intrinsics: a few rows against 64 columns, written in vector IR.

``tile(rows, a, a_step, b, b_step, count, c, c_step, columns)`` does ``c[r, :columns] += a[r, :] @ b[:, :columns]`` for up to
``TILE`` rows ``r``. Each number of ``c`` is one chain of fused multiply-adds over the rows of ``b`` in order,
whatever ``rows`` is, so a row gets the same bits alone and in company. The accumulators of a tile live in
registers, which is what a loop written in Python cannot be made to do.

Two forms of the inner step, the same on every row of one machine:

- ``dot``: bfloat16 pairs, ``vdpbf16ps`` (AVX-512 BF16): ``c += a0 * b0 + a1 * b1``, rounded as that instruction does;
- otherwise one float32 FMA a row of ``b``, which is float32, bfloat16 or float16 in memory.
"""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

TILE = 6
"""Most rows of a tile: 6 x 4 accumulators, 4 columns of ``b`` and a broadcast fit in 32 vector registers."""
COLUMNS = 64
"""Columns of a tile; ``c`` must have room for all of them, ``b`` is read for the first ``columns`` only."""
LANES = 16
_PARTS = COLUMNS // LANES

_I1, _I16, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32S, I32S, I16S = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)
_F16S = ir.VectorType(ir.HalfType(), LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def has_dot() -> bool:
    """Whether this CPU multiplies bfloat16 pairs (AVX-512 BF16)."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


def _make(rows: int, form: str, *, whole: bool) -> Any:
    """The intrinsic for ``rows`` rows; ``whole`` reads all 64 columns without a mask."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(context: Any, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, c: Any, c_step: Any, columns: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Tile(builder, form, whole=whole).write(rows, *arguments)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


class VectorWriter:
    """Short words for the vector IR of a function under construction."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def constant(self, value: float) -> Any:
        return ir.Constant(F32S, [value] * LANES)

    def whole(self, value: int) -> Any:
        return ir.Constant(I32S, [value] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.function("llvm.fma.v16f32", F32S, [F32S] * 3), [a, b, c])

    def splat(self, value: Any, kind: Any) -> Any:
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    def load(self, address: Any, offset: int, kind: Any, mask: Any = None) -> Any:
        pointer = self.pointer(address, offset, kind)
        if mask is None:
            return self.builder.load(pointer, align=2)
        name, align = {F32S: ("v16f32", 4), I16S: ("v16i16", 2)}[kind]
        masks = ir.VectorType(_I1, LANES)
        load = self.function(f"llvm.masked.load.{name}.p0", kind, [kind.as_pointer(), _I32, masks, kind])
        return self.builder.call(load, [pointer, ir.Constant(_I32, align), mask, ir.Constant(kind, None)])

    def pointer(self, address: Any, offset: int, kind: Any) -> Any:
        return self.cast(self.builder.add(address, _int(offset)), kind)

    def cast(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.builder.module
        known = module.globals.get(name)
        return ir.Function(module, ir.FunctionType(result, arguments), name) if known is None else known


class _Tile(VectorWriter):
    """Writes one tile into a function. All addresses and steps are int64 bytes."""

    def __init__(self, builder: Any, form: str, *, whole: bool) -> None:
        super().__init__(builder)
        self.form, self.unmasked = form, whole

    def write(self, rows: int, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, c: Any, c_step: Any, columns: Any) -> None:
        builder = self.builder
        a_rows = [builder.add(a, builder.mul(a_step, _int(r))) for r in range(rows)]
        c_rows = [builder.add(c, builder.mul(c_step, _int(r))) for r in range(rows)]
        masks = None if self.unmasked else [self._mask(columns, part) for part in range(_PARTS)]
        start = [[self.load(row, part * 64, F32S) for part in range(_PARTS)] for row in c_rows]
        before = builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("tile", "tile_row", "tile_done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(_I64)
        index.add_incoming(_int(0), before)
        sums = [[builder.phi(F32S) for _ in range(_PARTS)] for _ in range(rows)]
        builder.cbranch(builder.icmp_signed("<", index, count), body, done)
        builder.position_at_end(body)
        values = self._columns(b, b_step, index, masks)
        fresh = [self._step(row, index, own, values) for row, own in zip(a_rows, sums, strict=True)]
        following = builder.add(index, _int(1))
        index.add_incoming(following, builder.block)
        for own, first, after in zip(sums, start, fresh, strict=True):
            for phi, old, new in zip(own, first, after, strict=True):
                phi.add_incoming(old, before)
                phi.add_incoming(new, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        for row, own in zip(c_rows, sums, strict=True):
            for part, value in enumerate(own):
                builder.store(value, self.pointer(row, part * 64, F32S), align=4)

    def _columns(self, b: Any, b_step: Any, index: Any, masks: Any) -> list[Any]:
        """The four vectors of ``b`` of one step: float32 rows, or interleaved bfloat16 pairs."""
        builder = self.builder
        if self.form != "dot":
            row = builder.add(b, builder.mul(b_step, index))
            return [self._to_float(row, part, masks) for part in range(_PARTS)]
        low = builder.add(b, builder.mul(b_step, builder.shl(index, _int(1))))
        high = builder.add(low, b_step)
        pairs = [x for lane in range(LANES) for x in (lane, LANES + lane)]
        order = ir.Constant(ir.VectorType(_I32, 2 * LANES), pairs)
        values = []
        for part in range(_PARTS):
            mask = None if masks is None else masks[part]
            both = builder.shuffle_vector(self.load(low, part * 32, I16S, mask), self.load(high, part * 32, I16S, mask), order)
            values.append(builder.bitcast(both, _PAIRS))
        return values

    def _to_float(self, row: Any, part: int, masks: Any) -> Any:
        builder, mask = self.builder, None if masks is None else masks[part]
        if self.form == "float32":
            return self.load(row, part * 64, F32S, mask)
        raw = self.load(row, part * 32, I16S, mask)
        if self.form == "float16":
            return builder.fpext(builder.bitcast(raw, _F16S), F32S)
        return builder.bitcast(builder.shl(builder.zext(raw, I32S), ir.Constant(I32S, [16] * LANES)), F32S)

    def _step(self, row: Any, index: Any, sums: list[Any], values: list[Any]) -> list[Any]:
        builder = self.builder
        at = builder.add(row, builder.shl(index, _int(2)))  # a float32, or a pair of bfloat16
        if self.form == "dot":
            factor = builder.bitcast(self.splat(builder.load(self.cast(at, _I32), align=4), I32S), _PAIRS)
            dot = self.function("llvm.x86.avx512bf16.dpbf16ps.512", F32S, [F32S, _PAIRS, _PAIRS])
            return [builder.call(dot, [total, factor, value]) for total, value in zip(sums, values, strict=True)]
        factor = self.splat(builder.load(self.cast(at, _F32), align=4), F32S)
        return [self.fma(factor, value, total) for total, value in zip(sums, values, strict=True)]

    def _mask(self, columns: Any, part: int) -> Any:
        lanes = ir.Constant(ir.VectorType(_I64, LANES), [part * LANES + lane for lane in range(LANES)])
        return self.builder.icmp_signed("<", lanes, self.splat(columns, ir.VectorType(_I64, LANES)))


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def make_tile(form: str) -> Any:  # noqa: C901 (one branch a tile height)
    """The compiled ``tile`` function of one form: ``dot``, ``float32``, ``bfloat16`` or ``float16``."""
    one, two, three, four, five, six = (_make(rows, form, whole=True) for rows in range(1, TILE + 1))
    part_one, part_two, part_three, part_four, part_five, part_six = (
        _make(rows, form, whole=False) for rows in range(1, TILE + 1)
    )

    def tile(  # noqa: PLR0912 (one branch a tile height)
        rows: Any, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, c: Any, c_step: Any, columns: Any
    ) -> None:
        if columns >= COLUMNS:
            if rows == 1:
                one(a, a_step, b, b_step, count, c, c_step, columns)
            elif rows == 2:
                two(a, a_step, b, b_step, count, c, c_step, columns)
            elif rows == 3:
                three(a, a_step, b, b_step, count, c, c_step, columns)
            elif rows == 4:
                four(a, a_step, b, b_step, count, c, c_step, columns)
            elif rows == 5:
                five(a, a_step, b, b_step, count, c, c_step, columns)
            else:
                six(a, a_step, b, b_step, count, c, c_step, columns)
        elif rows == 1:
            part_one(a, a_step, b, b_step, count, c, c_step, columns)
        elif rows == 2:
            part_two(a, a_step, b, b_step, count, c, c_step, columns)
        elif rows == 3:
            part_three(a, a_step, b, b_step, count, c, c_step, columns)
        elif rows == 4:
            part_four(a, a_step, b, b_step, count, c, c_step, columns)
        elif rows == 5:
            part_five(a, a_step, b, b_step, count, c, c_step, columns)
        else:
            part_six(a, a_step, b, b_step, count, c, c_step, columns)

    # Compiled code is looked up by name: two forms of one name, loaded from Numba's cache, would be taken for each other.
    tile.__name__ = tile.__qualname__ = f"tile_{form}"
    return njit(error_model="numpy")(tile)
