"""Register tiles of a matrix product as a Numba intrinsic: a few rows against 64 columns, written in vector IR.

``tile(rows, a, b, count, start, c, ahead)`` does ``c[r, :64] = start[r, :64] + a[r, :] @ b[:, :64]`` for 1 to ``TILE`` rows
``r``, ``count`` (at least one) rows of ``b`` and a word of 32 bits of ``a`` for each. At each row of ``b`` it asks for a cache
line ``ahead``. All but the two numbers are pairs of an address and a step in bytes. Every number of ``c`` is one chain of
multiply-adds over the rows of ``b`` in order, whatever ``rows`` is, so a row gets the same bits alone and in company.
The accumulators of a tile live in registers, which is what a loop written in Python cannot be made to do.

Two forms of the inner step, the same on every row of one machine:

- ``dot``: a word is a pair of bfloat16, ``vdpbf16ps`` (AVX-512 BF16): ``c += a0 * b0 + a1 * b1``, rounded as that
  instruction does;
- ``float32``: one fused multiply-add.
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
"""Columns of a tile; ``b``, ``start`` and ``c`` must have all of them."""
LANES = 16
_PARTS = COLUMNS // LANES

I16, I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32S, I32S, I16S = ir.VectorType(_F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def has_dot() -> bool:
    """Whether this CPU multiplies bfloat16 pairs (AVX-512 BF16)."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 matrices as such (AMX), many times as fast as pairs."""
    return bool(llvm.get_host_cpu_features().get("amx-bf16", False))


class VectorWriter:
    """Short words for the vector IR of a function under construction. Addresses are int64."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def constant(self, value: float) -> Any:
        return ir.Constant(F32S, [value] * LANES)

    def whole(self, value: int) -> Any:
        return ir.Constant(I32S, [value] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.function("llvm.fma.v16f32", F32S, [F32S] * 3), [a, b, c])

    def dot(self, total: Any, a: Any, b: Any) -> Any:
        """``total + a0 * b0 + a1 * b1`` for each pair of bfloat16 of ``a`` and ``b`` (32 lanes of bfloat16)."""
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return self.builder.call(self.function(name, F32S, [F32S, PAIRS, PAIRS]), [total, a, b])

    def splat(self, value: Any, kind: Any) -> Any:
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(I32S, [0] * LANES))

    def load(self, address: Any, offset: int, kind: Any) -> Any:
        return self.builder.load(self.pointer(address, offset, kind), align=2)

    def store(self, value: Any, address: Any, offset: int) -> None:
        self.builder.store(value, self.pointer(address, offset, value.type), align=2)

    def fetch(self, address: Any) -> None:
        """Ask for the cache line at ``address``, which need not be readable, to come as far as the second level."""
        pointer, read, second_level, data = ir.IntType(8).as_pointer(), I32(0), I32(2), I32(1)
        prefetch = self.function("llvm.prefetch.p0", ir.VoidType(), [pointer, I32, I32, I32])
        self.builder.call(prefetch, [self.builder.inttoptr(address, pointer), read, second_level, data])

    def pointer(self, address: Any, offset: int, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(address, _int(offset)), kind.as_pointer())

    def function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.builder.module
        known = module.globals.get(name)
        return ir.Function(module, ir.FunctionType(result, arguments), name) if known is None else known


class _Tile(VectorWriter):
    """Writes one tile into a function."""

    def write(self, form: str, rows: int, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, *places: Any) -> None:
        builder, (start, start_step, c, c_step, ahead, ahead_step) = self.builder, places
        a_rows, start_rows, c_rows = (
            [builder.add(address, builder.mul(step, _int(r))) for r in range(rows)]
            for address, step in ((a, a_step), (start, start_step), (c, c_step))
        )
        first = [[self.load(row, part * 64, F32S) for part in range(_PARTS)] for row in start_rows]
        before, body, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(_I64)
        sums = [[builder.phi(F32S) for _ in range(_PARTS)] for _ in range(rows)]
        self.fetch(builder.add(ahead, builder.mul(ahead_step, index)))
        line = builder.add(b, builder.mul(b_step, index))
        values = [self.load(line, part * 64, I32S) for part in range(_PARTS)]
        fresh = [self._step(form, row, index, own, values) for row, own in zip(a_rows, sums, strict=True)]
        following = builder.add(index, _int(1))
        for phi, old, new in [(index, _int(0), following), *_each(sums, first, fresh)]:
            phi.add_incoming(old, before)
            phi.add_incoming(new, body)
        builder.cbranch(builder.icmp_signed("<", following, count), body, done)
        builder.position_at_end(done)
        for row, own in zip(c_rows, fresh, strict=True):
            for part, value in enumerate(own):
                self.store(value, row, part * 64)

    def _step(self, form: str, row: Any, index: Any, sums: list[Any], values: list[Any]) -> list[Any]:
        builder = self.builder
        word = builder.load(builder.inttoptr(builder.add(row, builder.shl(index, _int(2))), I32.as_pointer()), align=4)
        factor, kind = self.splat(word, I32S), PAIRS if form == "dot" else F32S
        factor, *values = (builder.bitcast(words, kind) for words in (factor, *values))
        if form == "dot":
            return [self.dot(total, factor, value) for total, value in zip(sums, values, strict=True)]
        return [self.fma(factor, value, total) for total, value in zip(sums, values, strict=True)]


def _each(*tables: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The entries of equal tables side by side, row after row."""
    return [entry for rows in zip(*tables, strict=True) for entry in zip(*rows, strict=True)]


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def make_tile(form: str) -> Any:
    """The compiled ``tile`` function of one form, ``dot`` or ``float32``."""

    @intrinsic  # type: ignore[untyped-decorator]
    def written(
        context: Any,
        rows: Any,
        a: Any,
        a_step: Any,
        b: Any,
        b_step: Any,
        count: Any,
        start: Any,
        start_step: Any,
        c: Any,
        c_step: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            height, *rest = arguments
            end = builder.append_basic_block("tile_end")
            switch = builder.switch(height, end)
            for number in range(1, TILE + 1):
                block = builder.append_basic_block(f"tile_{number}")
                switch.add_case(_int(number), block)
                builder.position_at_end(block)
                _Tile(builder).write(form, number, *rest)
                builder.branch(end)
            builder.position_at_end(end)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 12), generate

    def tile(rows: Any, factors: Any, panel: Any, count: Any, start: Any, target: Any, ahead: Any) -> None:
        (a, a_step), (b, b_step), (first, first_step), (c, c_step) = factors, panel, start, target
        written(rows, a, a_step, b, b_step, count, first, first_step, c, c_step, ahead[0], ahead[1])

    # Compiled code is looked up by name: two forms of one name, loaded from Numba's cache, would be taken for each other.
    tile.__name__ = tile.__qualname__ = f"tile_{form}"
    return njit(error_model="numpy")(tile)
