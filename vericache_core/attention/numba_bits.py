"""A Numba intrinsic that turns addresses into pointers."""

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
