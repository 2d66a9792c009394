"""Options of ``turboquant``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vericache_core import Options, option
from vericache_core.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class TurboQuantOptions(Options):
    """Options of :class:`~vericache_compressor_turboquant.compressor.TurboQuantCompressor`.

    ``mode="prod"`` spends one of the key bits on a sign sketch of the rounding error (the paper's second
    scheme), which makes query-key products unbiased and noisier. Softmax attention suffers more from the noise
    than from the bias, so it is off by default. It needs 2 bits or more.

    Raises:
        OptionError: ``mode="prod"`` with 1-bit keys.
    """

    bits: int = option(4, help="bits per coordinate, for keys and values", ge=1, le=4)
    key_bits: int | None = option(None, help="bits per key coordinate; bits unless given", ge=1, le=4)
    value_bits: int | None = option(None, help="bits per value coordinate; bits unless given", ge=1, le=4)
    mode: Literal["mse", "prod"] = option("mse", help="keys: least squared error, or unbiased products (noisier)")
    values: Literal["mse", "uniform"] = option("mse", help="values: rotated like keys, or min/max codes per token")
    rotation: Literal["auto", "hadamard", "haar"] = option("auto", help="auto: hadamard for powers of two, else haar")
    norm_correction: bool = option(True, help="restore each vector's length after rounding (not in mode prod)")
    residual: int = option(0, help="newest tokens that stay exact", unit="tokens", ge=0)
    seed: int = option(0, help="seed of the rotations", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "prod" and self.key_width < 2:
            raise OptionError("mode=prod needs key_bits of at least 2", cause="one bit goes to the sketch of the error")

    @property
    def key_width(self) -> int:
        """Bits per key coordinate."""
        return self.bits if self.key_bits is None else self.key_bits

    @property
    def value_width(self) -> int:
        """Bits per value coordinate."""
        return self.bits if self.value_bits is None else self.value_bits
