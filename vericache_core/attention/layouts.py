"""How a codec lays its codes out, for kernels that read codes as they are stored.

A codec that says so (``Codec.layout``) is attended to by a fused kernel on devices that have one; any other
codec is decoded block by block. The layout is a promise about ``Codec.encode``; tests compare both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, eq=False)
class CodeLayout:
    """Codes of ``bits`` bits, packed along the last axis by :func:`vericache_core.packing.pack`.

    Attributes:
        form: what an element decodes to.

            - ``"token-groups"``: ``code * scale + low``; a group is ``group`` consecutive tokens of one channel.
              ``codes [kv_heads, units, width, packed_size(group, bits)]``, ``scale`` and ``low``
              ``[kv_heads, units, width]``; ``unit`` of the codec is ``group``.
            - ``"channel-groups"``: the same with ``group`` consecutive channels of one token.
              ``codes [kv_heads, tokens, width / group, packed_size(group, bits)]`` (``scale`` and ``low``
              without the last axis; the group axis may be missing where ``group == width``).
            - ``"table"``: ``table[code] * scale``, one scale a token.
              ``codes [kv_heads, tokens, packed_size(width, bits)]``, ``scale [kv_heads, tokens]``.
        bits: 1, 2, 3, 4 or 8.
        group: elements that share a scale; the whole width for ``"table"``.
        table: float32 ``[2 ** bits]``, for ``"table"`` only.
    """

    form: Literal["token-groups", "channel-groups", "table"]
    bits: int
    group: int
    table: Tensor | None = None
