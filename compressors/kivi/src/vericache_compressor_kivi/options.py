"""Options of ``kivi`` and where their defaults come from."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_core import Options, option
from vericache_core.errors import OptionError

WIDTHS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class KiviOptions(Options):
    """Options of :class:`~vericache_compressor_kivi.compressor.KiviCompressor`.

    The defaults (2 bits, groups of 32, residual 128) are the paper's main setting.

    Raises:
        OptionError: ``residual`` is no multiple of ``group``, or a group of codes does not fill whole bytes.
    """

    bits: int = option(2, help="bits per code, for keys and values", choices=WIDTHS)
    key_bits: int | None = option(None, help="bits per key code; bits unless given", choices=WIDTHS)
    value_bits: int | None = option(None, help="bits per value code; bits unless given", choices=WIDTHS)
    group: int = option(32, help="elements that share a scale: tokens for keys, channels for values", ge=4)
    residual: int = option(128, help="newest tokens that stay exact; a multiple of group", unit="tokens", ge=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual % self.group:
            nearest = max(1, round(self.residual / self.group)) * self.group
            raise OptionError(
                f"residual={self.residual} is no multiple of group={self.group}",
                cause="keys are encoded in whole groups of tokens",
                hint=f"try residual={nearest}",
            )
        if self.group * min(self.key_width, self.value_width) % 8:
            raise OptionError(
                f"group={self.group} codes of {min(self.key_width, self.value_width)} bits do not fill whole bytes",
                hint=f"try group={(self.group + 3) // 4 * 4}",
            )

    @property
    def key_width(self) -> int:
        """Bits per key code."""
        return self.bits if self.key_bits is None else self.key_bits

    @property
    def value_width(self) -> int:
        """Bits per value code."""
        return self.bits if self.value_bits is None else self.value_bits
