"""Options of ``snapkv`` and where their defaults come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vericache_core import Budget, option
from vericache_core.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class SnapKVOptions(Budget):
    """Options of :class:`~vericache_compressor_snapkv.compressor.SnapKVCompressor`.

    The budget (``keep`` or ``keep_tokens``, 0.25 unless given) counts the tokens kept per KV head, the
    observation window included. Window 32, kernel 7 and max pooling are the settings of the paper's LongBench
    experiments (and of AdaKV's); the classes of the reference code default to 64, 5 and average pooling.

    Raises:
        OptionError: ``kernel`` is even, so that pooling would have no centre.
    """

    window: int = option(32, help="newest prompt tokens that observe the others and always survive", unit="tokens", ge=1)
    kernel: int = option(7, help="width of the pooling over neighbouring tokens, odd; 1 for none", unit="tokens", ge=1)
    pooling: Literal["max", "avg"] = option("max", help="how neighbouring scores are pooled")
    reducer: Literal["mean", "max", "sum"] = option(
        "mean", help="how query heads that share a KV head are reduced, before pooling"
    )
    budget: Literal["uniform", "pyramid"] = option("uniform", help="the same budget in every layer, or more in early layers")
    beta: int = option(20, help="pyramid: the last layer gets 1/beta of the average, beside the window", ge=1)
    adaptive: bool = option(False, help="share a layer's budget among its KV heads by need (AdaKV)")
    floor: float = option(0.2, help="adaptive: fraction of the uniform share that every KV head gets", ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise OptionError(f"kernel: expected an odd number, got {self.kernel}", hint=f"try {self.kernel + 1}")
