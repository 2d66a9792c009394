"""Faults of codes, bytes and attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, Quant, RowCodec, spec
from vericache_conform.mutants.maps import changed_layers
from vericache_core.attention.online import AttentionState
from vericache_core.coded import Codec, CodedLayer, Codes
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV, LayerDescriptor, PlainLayer, PrefixView


class _ZeroScale(RowCodec):
    def encode(self, rows: Tensor) -> Codes:
        codes = dict(super().encode(rows))
        flat = rows.float().amax(-1, keepdim=True) == rows.float().amin(-1, keepdim=True)
        codes["step"] = torch.where(flat, torch.full_like(codes["step"], float("nan")), codes["step"])
        return codes


class NanOnConstant(Quant):
    """0/0 where a row has no range."""

    name = "nan-on-constant"

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        return _ZeroScale(self.options.bits)


class _Exact(RowCodec):
    def encode(self, rows: Tensor) -> Codes:
        return {"rows": rows.float()}

    def decode(self, codes: Codes) -> Tensor:
        return codes["rows"]


class ExactByAccident(Quant):
    """Says that it quantizes and stores everything."""

    name = "exact-by-accident"

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return _Exact(self.options.bits)


class _Rotated(RowCodec):
    """Puts keys back into unrotated form by a wrong position."""

    def decode(self, codes: Codes) -> Tensor:
        rows = super().decode(codes)
        half = rows.shape[-1] // 2
        angle = torch.full((half,), 0.7)
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


class WrongRope(Quant):
    name = "wrong-rope"

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return _Rotated(self.options.bits)


class _Unlisted(CodedLayer):
    """Leaves the scales out of the account."""

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: part for name, part in super().tensors().items() if not name.endswith(".step")}


class ForgetsScales(Quant):
    name = "forgets-scales"
    layer_type = _Unlisted


class KeepsLargeStorage(Drop):
    """Stores slices of a tensor that is much larger."""

    name = "keeps-large-storage"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            room = torch.cat([layer.flat_keys, torch.zeros_like(layer.flat_keys), torch.zeros_like(layer.flat_keys)])
            return PlainLayer(room[: len(layer.flat_keys)], layer.flat_values, layer.surviving)

        return changed_layers(super().compress(prefix, context), change)


class _Shortcut(PlainLayer):
    """Attends to the newest half of what is stored, as a trailing mask would."""

    def attend(self, query: Tensor, state: AttentionState) -> None:
        kv_heads, count = self.surviving.kv_heads, min(self.surviving.counts)
        keys = torch.stack([self.head(h)[0][-(count // 2 + 1) :] for h in range(kv_heads)])
        values = torch.stack([self.head(h)[1][-(count // 2 + 1) :] for h in range(kv_heads)])
        state.fold(query, keys, values)


class MaskShortcut(Drop):
    name = "mask-shortcut"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            return _Shortcut(layer.flat_keys, layer.flat_values, layer.surviving)

        return changed_layers(super().compress(prefix, context), change)


class _WrongQuery(CodedLayer):
    """Rotates the query once more, for the position in the stored rows."""

    def attend(self, query: Tensor, state: AttentionState) -> None:
        half = query.shape[-1] // 2
        turned = torch.cat([-query[..., half:], query[..., :half]], -1)
        super().attend(query * 0.8 + turned * 0.6, state)


class RotatesQueries(Quant):
    name = "rotates-queries"
    layer_type = _WrongQuery


class _Raising(CodedLayer):
    def attend(self, query: Tensor, state: AttentionState) -> None:
        raise RuntimeError("kernel launch failed")


class RaisesInAttend(Quant):
    name = "raises-in-attend"
    layer_type = _Raising


NAN_ON_CONSTANT = spec(NanOnConstant)
EXACT_BY_ACCIDENT = spec(ExactByAccident)
WRONG_ROPE = spec(WrongRope)
FORGETS_SCALES = spec(ForgetsScales)
KEEPS_LARGE_STORAGE = spec(KeepsLargeStorage)
MASK_SHORTCUT = spec(MaskShortcut)
ROTATES_QUERIES = spec(RotatesQueries)
RAISES_IN_ATTEND = spec(RaisesInAttend)
