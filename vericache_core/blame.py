"""Which line of a plugin an exception comes from, for messages that its author reads."""

from __future__ import annotations

import sys
import traceback
from typing import Final

LIBRARIES: Final = sys.stdlib_module_names | {
    "hypothesis",
    "numba",
    "numpy",
    "torch",
    "transformers",
    "vericache_conform",
    "vericache_core",
}
"""Packages whose frames do not say where a plugin is wrong."""


def raised_at(error: BaseException) -> str:
    """The innermost frame that is none of a library, as `` (my_package.compressor, line 7, in score)``.

    The causes of ``error`` are looked at first. Empty where every frame is a library's. It names the module and not the
    file, so that a report is the same on every machine.
    """
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__
    for one in reversed(chain):
        for frame, line in reversed([*traceback.walk_tb(one.__traceback__)]):
            module = str(frame.f_globals.get("__name__", ""))
            if module.partition(".")[0] not in LIBRARIES:
                return f" ({module}, line {line}, in {frame.f_code.co_name})"
    return ""
