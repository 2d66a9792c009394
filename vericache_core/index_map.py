"""Which positions of the full cache survive in a compressed one, per KV head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class HeadMap:
    """Surviving positions of one layer, one ascending list per KV head.

    Held as a bitmask of ``ceil(tokens / 8)`` bytes a head or as int32 positions, whichever is smaller
    (the bitmask from a kept fraction of 1/32 on); ``None`` storage when everything survives.

    Args:
        heads: per KV head an integer tensor ``[kept]``, strictly ascending, in ``[0, tokens)``.
        tokens: length of the full cache that the positions refer to.

    Raises:
        ValueError: positions unsorted, repeated or out of range.
    """

    __slots__ = ("_positions", "counts", "packed", "tokens")

    def __init__(self, heads: Sequence[Tensor], tokens: int) -> None:
        self.tokens = tokens
        checked = [_checked(head, tokens, number) for number, head in enumerate(heads)]
        self.counts: tuple[int, ...] = tuple(len(head) for head in checked)
        self.packed: Tensor | None = None
        self._positions: Tensor | None = None
        if all(count == tokens for count in self.counts):
            return
        if sum(self.counts) * 4 <= len(heads) * ((tokens + 7) // 8):
            self._positions = torch.cat(checked).to(torch.int32)
        else:
            bits = torch.zeros((len(heads), (tokens + 7) // 8 * 8), dtype=torch.uint8)
            for number, head in enumerate(checked):
                bits[number, head] = 1
            weights = (1 << torch.arange(8)).to(torch.uint8)
            self.packed = (bits.view(len(heads), -1, 8) * weights).sum(-1, dtype=torch.uint8)

    @classmethod
    def everything(cls, tokens: int, kv_heads: int) -> HeadMap:
        """The map of a compressor that drops nothing; takes no storage."""
        return cls([torch.arange(tokens)] * kv_heads, tokens)

    @classmethod
    def from_storage(cls, counts: Sequence[int], tokens: int, storage: Mapping[str, Tensor]) -> HeadMap:
        """Inverse of :meth:`named_storage`.

        Raises:
            ValueError: the storage does not describe a sound map with these counts.
        """
        made = cls.everything(0, 0)
        made.tokens, made.counts = tokens, tuple(counts)
        made.packed, made._positions = storage.get("bits"), storage.get("positions")  # noqa: SLF001  # its own class
        if len(storage) != (0 if made.complete else 1) or not set(storage) <= {"bits", "positions"}:
            raise ValueError(f"a map has one storage, bits or positions, unless it is complete; got {sorted(storage)}")
        made._check_storage()  # noqa: SLF001  # its own class
        made.check_integrity()
        return made

    def named_storage(self) -> dict[str, Tensor]:
        """The stored tensors by form: ``bits`` or ``positions``; empty when everything survives."""
        named = {"bits": self.packed, "positions": self._positions}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def kv_heads(self) -> int:
        return len(self.counts)

    @property
    def complete(self) -> bool:
        """True when every position of every head survives."""
        return all(count == self.tokens for count in self.counts)

    def head(self, number: int) -> Tensor:
        """int64 ``[kept]``, ascending positions of KV head ``number``."""
        if self.counts[number] == self.tokens:
            return torch.arange(self.tokens)
        if self._positions is not None:
            start = sum(self.counts[:number])
            return self._positions[start : start + self.counts[number]].long()
        return torch.from_numpy(np.flatnonzero(self.mask(number).numpy()))

    def mask(self, number: int) -> Tensor:
        """True where KV head ``number`` keeps the position, bool ``[tokens]``."""
        if self.packed is not None:
            # NumPy takes a tenth of the time of torch for it, and every layer of every swap asks.
            bits = np.unpackbits(self.packed[number].numpy(), count=self.tokens, bitorder="little")
            return torch.from_numpy(bits).bool()
        mask = torch.zeros(self.tokens, dtype=torch.bool)
        mask[self.head(number)] = True
        return mask

    def dropped(self, number: int) -> Tensor:
        """int64, ascending positions that KV head ``number`` does not keep."""
        return torch.nonzero(~self.mask(number)).flatten()

    def storage(self) -> tuple[Tensor, ...]:
        """The tensors that the map occupies, for byte accounting."""
        return tuple(part for part in (self.packed, self._positions) if part is not None)

    def grown(self, tokens: int) -> HeadMap:
        """The map after ``tokens`` more positions were appended and kept by every head."""
        if self.complete:
            return HeadMap.everything(self.tokens + tokens, self.kv_heads)
        fresh = torch.arange(self.tokens, self.tokens + tokens)
        return HeadMap([torch.cat([self.head(h), fresh]) for h in range(self.kv_heads)], self.tokens + tokens)

    def cut(self, tokens: int) -> HeadMap:
        """The map of the first ``tokens`` positions."""
        heads = [self.head(h) for h in range(self.kv_heads)]
        return HeadMap([head[head < tokens] for head in heads], tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadMap):
            return NotImplemented
        same_shape = (self.tokens, self.counts) == (other.tokens, other.counts)
        return same_shape and all(torch.equal(self.head(h), other.head(h)) for h in range(self.kv_heads))

    __hash__ = None  # type: ignore[assignment]  # equal by content of tensors, so not hashable

    def __repr__(self) -> str:
        return f"HeadMap(tokens={self.tokens}, counts={self.counts})"

    def check_integrity(self) -> None:
        """Raise ``ValueError`` if the stored form is not a strictly ascending in-range map."""
        for number in range(self.kv_heads):
            # Through the mask, because head() does not look at what is stored for a head that keeps everything.
            stored = self.head(number) if self.packed is None else torch.nonzero(self.mask(number)).flatten()
            head = _checked(stored, self.tokens, number)
            if len(head) != self.counts[number]:
                raise ValueError(f"head {number} stores {len(head)} positions, counts say {self.counts[number]}")

    def _check_storage(self) -> None:
        if self.packed is not None:
            shape = (self.kv_heads, (self.tokens + 7) // 8)
            if self.packed.dtype != torch.uint8 or self.packed.shape != shape:
                raise ValueError(f"bitmask of {self.packed.dtype} {tuple(self.packed.shape)}, expected uint8 {shape}")
            if self.tokens % 8 and bool((self.packed[:, -1] >> self.tokens % 8).any()):
                raise ValueError(f"bitmask has bits past {self.tokens} tokens")
        if self._positions is not None and (
            self._positions.dtype != torch.int32 or self._positions.shape != (sum(self.counts),) or min(self.counts) < 0
        ):
            raise ValueError(f"{tuple(self._positions.shape)} {self._positions.dtype} positions for counts {self.counts}")


def _checked(head: Tensor, tokens: int, number: int) -> Tensor:
    if head.is_floating_point() or head.dtype == torch.bool or head.dim() != 1:
        raise ValueError(f"head {number}: positions must be a 1-d integer tensor, got {head.dtype} {tuple(head.shape)}")
    head = head.detach().to("cpu", torch.int64)
    if len(head):
        if int(head.min()) < 0 or int(head.max()) >= tokens:
            raise ValueError(f"head {number}: position outside [0, {tokens})")
        if len(head) > 1 and not bool((head[1:] > head[:-1]).all()):
            raise ValueError(f"head {number}: positions must be strictly ascending")
    return head
