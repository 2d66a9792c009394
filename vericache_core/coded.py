"""Rows held as codes: a stream of encoded segments followed by exact rows, append only.

Keys and values of a layer are two separate streams, because methods set their boundaries differently
(KIVI: keys by whole residual blocks, values token by token). Codes are written once and never decoded
and encoded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vericache_core.attention.fused import fold_fused
from vericache_core.attention.layouts import CodeLayout
from vericache_core.attention.online import AttentionState
from vericache_core.attention.sources import CodedPart, SourceTable, codes_of, exact_of, joined
from vericache_core.errors import PayloadError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedLayer, StoredLayer

Codes = Mapping[str, Tensor]


class Codec(ABC):
    """Encodes rows of one layer's keys or values.

    Units are independent: encoding ``a`` then ``b`` gives the codes of ``a + b``. Every tensor of
    :class:`Codes` has the units on axis 1 (axis 0 is ``kv_heads``), so that codes can be cut at units.
    """

    unit: int = 1
    """Tokens that are encoded together (1 when each token stands alone)."""
    layout: CodeLayout | None = None
    """How the codes lie, where a fused kernel may read them as they are; ``None`` decodes block by block."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Codes:
        """Encode ``[kv_heads, tokens, width]``; ``tokens`` is a multiple of ``unit``. Must not change ``rows``."""

    @abstractmethod
    def decode(self, codes: Codes) -> Tensor:
        """``[kv_heads, units * unit, width]``, any float dtype. Deterministic."""


SEGMENT_TOKENS = 4096
"""Codes are held in segments of so many tokens, counted from the first: appending copies one at most, and
the layout depends on the number of tokens only, not on how they arrived."""


@dataclass(frozen=True, eq=False)
class Segment:
    """``tokens`` rows out of codes of whole units; the last unit may be used in part after a rollback."""

    codes: Codes
    tokens: int


class CodedRows:
    """A stream of rows: segments of codes, then exact rows. Immutable; every change returns a new one.

    Args:
        codec: encodes and decodes.
        segments: encoded part, in order.
        exact: ``[kv_heads, tokens, width]``, newest rows, in the model's dtype.
    """

    def __init__(self, codec: Codec, segments: tuple[Segment, ...], exact: Tensor) -> None:
        self.codec, self.segments, self.exact = codec, segments, exact

    @property
    def encoded_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def tokens(self) -> int:
        return self.encoded_tokens + self.exact.shape[1]

    def appended(self, rows: Tensor, boundary: int) -> CodedRows:
        """Append exact ``rows`` ``[kv_heads, n, width]``, then encode everything before ``boundary``."""
        exact = torch.cat([self.exact, rows.to(self.exact.dtype)], 1)
        unit = self.codec.unit
        fresh = (boundary - self.encoded_tokens) // unit
        if fresh <= 0:
            return CodedRows(self.codec, self.segments, exact)
        segments, done, capacity = list(self.segments), 0, max(1, SEGMENT_TOKENS // unit)
        while done < fresh:
            last = segments[-1] if segments else None
            if last is not None and (last.tokens % unit or last.tokens >= capacity * unit):
                last = None  # full, or its last unit was cut by a rollback: start another
            used = 0 if last is None else last.tokens // unit
            count = min(capacity - used, fresh - done)
            codes = dict(self.codec.encode(exact[:, done * unit : (done + count) * unit].contiguous()))
            if last is not None:
                codes = {name: torch.cat([last.codes[name], part], 1) for name, part in codes.items()}
                segments.pop()
            segments.append(Segment(codes, (used + count) * unit))
            done += count
        return CodedRows(self.codec, tuple(segments), exact[:, fresh * unit :].clone())

    def cut(self, tokens: int, boundary: int, original: Tensor | None) -> CodedRows:
        """Keep the first ``tokens`` rows.

        With ``original`` (``[kv_heads, tokens, width]`` exact rows) the result is what encoding up to
        ``boundary`` gives; without it rows that exist only as codes stay codes.
        """
        whole = boundary // self.codec.unit * self.codec.unit
        keep_encoded = min(self.encoded_tokens, tokens if original is None else whole)
        segments, left = [], keep_encoded
        for segment in self.segments:
            if left <= 0:
                break
            used = min(segment.tokens, left)
            units = -(-used // self.codec.unit)
            full = -(-segment.tokens // self.codec.unit)
            codes = segment.codes if units == full else {k: v[:, :units].clone() for k, v in segment.codes.items()}
            segments.append(Segment(codes, used))
            left -= used
        if original is None:
            exact = self.exact[:, : max(0, tokens - self.encoded_tokens)].clone()
        else:
            exact = original[:, keep_encoded:tokens].to(self.exact.dtype).clone()
        return CodedRows(self.codec, tuple(segments), exact)

    def pieces(self, limit: int) -> Iterator[tuple[int, Tensor]]:
        """``(start, rows [kv_heads, n, width])`` in order, at most about ``limit`` decoded tokens at a time."""
        start, unit = 0, self.codec.unit
        step = max(1, limit // unit)
        for segment in self.segments:
            done = 0
            units = -(-segment.tokens // unit)
            for first in range(0, units, step):
                codes = {name: part[:, first : first + step] for name, part in segment.codes.items()}
                rows = self.codec.decode(codes)[:, : segment.tokens - done]
                count = rows.shape[1]
                yield start + done, rows
                done += count
                del rows  # before the next ones are decoded
            start += segment.tokens
        if self.exact.shape[1]:
            yield start, self.exact

    @cached_property
    def coded_sources(self) -> SourceTable | None:
        """Where the codes lie; ``None`` if a kernel cannot read them."""
        return codes_of(self)

    @cached_property
    def sources(self) -> SourceTable | None:
        """Where the codes and the exact rows after them lie; ``None`` if a kernel cannot read them."""
        codes, exact = self.coded_sources, exact_of(self.exact, self.encoded_tokens)
        return None if codes is None or exact is None else joined([codes, exact])

    def decoded(self) -> Tensor:
        """All rows at once, ``[kv_heads, tokens, width]`` in the exact rows' dtype; for tests and inspection."""
        parts = [rows.to(self.exact.dtype) for _, rows in self.pieces(1 << 30)]
        return torch.cat(parts, 1) if parts else self.exact

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        named = {f"{prefix}.{i}.{name}": part for i, s in enumerate(self.segments) for name, part in s.codes.items()}
        return {**named, f"{prefix}.exact": self.exact}

    @classmethod
    def from_tensors(
        cls, codec: Codec, tensors: Mapping[str, Tensor], prefix: str, used: Sequence[int], like: Tensor
    ) -> CodedRows:
        """Inverse of :meth:`tensors`; ``used`` holds the tokens of each segment.

        ``like`` is one unit of rows, ``[kv_heads, unit, width]``: what the codec makes of it tells what the
        stored codes must look like.

        Raises:
            PayloadError: codes are missing, or of a shape, dtype or value that this codec does not write.
        """
        exact = tensors[f"{prefix}.exact"]
        if exact.dtype != like.dtype or exact.dim() != 3 or (exact.shape[0], exact.shape[2]) != (like.shape[0], like.shape[2]):
            raise PayloadError(f"payload holds exact {prefix} of {exact.dtype} {tuple(exact.shape)}")
        pattern, segments = codec.encode(like), []
        for number, tokens in enumerate(used):
            mark = f"{prefix}.{number}."
            codes = {name[len(mark) :]: part for name, part in tensors.items() if name.startswith(mark)}
            units = -(-tokens // codec.unit)
            if units < 1 or set(codes) != set(pattern):
                raise PayloadError(f"payload lacks the codes of segment {number} of the {prefix}")
            for name, part in codes.items():
                model = pattern[name]
                shape = (model.shape[0], units, *model.shape[2:])
                if part.dtype != model.dtype or part.shape != shape or not bool(torch.isfinite(part).all()):
                    raise PayloadError(f"payload holds bad codes: {prefix} segment {number} {name!r} {tuple(part.shape)}")
            segments.append(Segment(codes, tokens))
        return cls(codec, tuple(segments), exact)


class CodedLayer(CompressedLayer):
    """One layer whose keys and values are :class:`CodedRows` of equal length and own boundaries.

    ``surviving`` names the full-cache positions of the rows: everything for a pure quantizer, a subset
    after token dropping.
    """

    block = 2048
    """Most tokens decoded at a time while attending."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Who attends in a way of its own must say what the parts are, or there are none: they would bypass it."""
        super().__init_subclass__(**kwargs)
        if "attend" in vars(cls) and "parts" not in vars(cls):
            cls.parts = CompressedLayer.parts  # type: ignore[method-assign]

    def __init__(self, keys: CodedRows, values: CodedRows, surviving: HeadMap) -> None:
        if keys.tokens != values.tokens or set(surviving.counts) != {keys.tokens}:
            raise ValueError(f"{keys.tokens} key rows, {values.tokens} value rows, {surviving.counts} positions")
        self.keys, self.values, self.surviving = keys, values, surviving

    def attend(self, query: Tensor, state: AttentionState) -> None:
        if fold_fused(query, state, self.keys, self.values):
            return
        for keys, values in self.blocks():
            state.fold(query, keys, values)
            del keys, values  # a block must be gone before the next one is decoded

    def parts(self) -> Sequence[CodedPart] | None:
        keys, values = self.keys.sources, self.values.sources
        return None if keys is None or values is None else [CodedPart(keys, values, self.keys.tokens)]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``(keys, values)`` blocks ``[kv_heads, n, ...]`` in order; the two streams cut where either cuts."""
        key_pieces, value_pieces = self.keys.pieces(self.block), self.values.pieces(self.block)
        key, value = next(key_pieces, None), next(value_pieces, None)
        while key is not None and value is not None:
            (key_start, key_rows), (value_start, value_rows) = key, value
            count = min(key_rows.shape[1], value_rows.shape[1])
            yield key_rows[:, :count], value_rows[:, :count]
            key = None if count == key_rows.shape[1] else (key_start + count, key_rows[:, count:])
            value = None if count == value_rows.shape[1] else (value_start + count, value_rows[:, count:])
            del key_rows, value_rows  # a block must be gone before the next one is decoded
            key, value = key or next(key_pieces, None), value or next(value_pieces, None)

    def tensors(self) -> Mapping[str, Tensor]:
        return {**self.keys.tensors("keys"), **self.values.tensors("values")}

    def meta(self) -> dict[str, Any]:
        return {"keys": [s.tokens for s in self.keys.segments], "values": [s.tokens for s in self.values.segments]}

    @classmethod
    def from_stored(cls, stored: StoredLayer, key_codec: Codec, value_codec: Codec) -> CodedLayer:
        """Inverse of ``tensors`` and ``meta``.

        Raises:
            PayloadError: codes are missing or do not look like what the codecs write.
        """
        layer, streams = stored.descriptor, []
        for name, codec, width in (("keys", key_codec, layer.head_dim), ("values", value_codec, layer.value_dim)):
            like = torch.zeros((layer.kv_heads, codec.unit, width), dtype=layer.dtype)
            streams.append(CodedRows.from_tensors(codec, stored.tensors, name, stored.meta[name], like))
        return cls(streams[0], streams[1], stored.surviving)
