"""Numba intrinsics that reinterpret bits: addresses as pointers, bit patterns as floats."""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """int64 address -> void pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """uint32 bit pattern -> float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_from_float(typing_context: Any, value: Any) -> Any:
    """float32 -> uint32 bit pattern."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate
