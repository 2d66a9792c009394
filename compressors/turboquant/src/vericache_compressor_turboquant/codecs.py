"""Codecs: rotated Lloyd-Max codes (with or without a sketch of the error) and uniform codes per token.

Each vector stands alone (``unit`` 1), so appending needs no groups. A codec can also give rows in its rotated
space, where attention rotates the query once instead of every row.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from vericache_compressor_turboquant.codebook import lloyd_max
from vericache_compressor_turboquant.rotation import Rotation
from vericache_core import Codec
from vericache_core.coded import Codes
from vericache_core.errors import CompressorFault
from vericache_core.minmax import dequantize, quantize
from vericache_core.packing import pack, unpack

SQRT_HALF_PI = math.sqrt(math.pi / 2)


class SpaceCodec(Codec):
    """A codec whose rows live in a rotated space; ``rotation`` is ``None`` where it is the original one."""

    rotation: Rotation | None = None

    @abstractmethod
    def rotated(self, codes: Codes) -> Tensor:
        """float32 ``[kv_heads, tokens, width]`` in the rotated space."""

    def decode(self, codes: Codes) -> Tensor:
        rows = self.rotated(codes)
        return rows if self.rotation is None else self.rotation.backward(rows)


class RotatedCodec(SpaceCodec):
    """TurboQuant section 3.1 (algorithm 1): norm, rotation, nearest centroid per coordinate.

    Codes (axis 1 counts tokens): ``codes`` uint8 ``[kv_heads, tokens, ceil(width * bits / 8)]``, ``norm``
    float16 ``[kv_heads, tokens]``. With norm correction ``norm`` already contains the factor that gives the
    decoded vector the length of the original. Zero vectors come back as zeros.

    With ``sketch`` (section 3.2, algorithm 2, the QJL of the rounding error) one bit fewer goes into the
    centroids; ``signs`` uint8 ``[kv_heads, tokens, ceil(width / 8)]`` and ``error`` float16 are added. The
    sketch matrix is orthogonal, hence the factor ``sqrt(pi / 2) / sqrt(width)``; for a Gaussian matrix it would
    be ``sqrt(pi / 2) / width``, and mixing them up shrinks the correction to nothing.

    Args:
        width: head dimension.
        bits: bits per coordinate in all.
        rotation: of the vectors.
        label: who to name in an error.
        norm_correction: see above; not used with ``sketch``.
        sketch: rotation of the error, or ``None``.

    Raises:
        CompressorFault: a vector is longer than float16 can say (65504).
    """

    def __init__(
        self,
        width: int,
        bits: int,
        rotation: Rotation,
        *,
        label: str = "turboquant",
        norm_correction: bool = True,
        sketch: Rotation | None = None,
    ) -> None:
        self.width, self.rotation, self.label, self.sketch = width, rotation, label, sketch
        self.bits = bits if sketch is None else bits - 1
        self.norm_correction = norm_correction and sketch is None
        self.centroids = torch.tensor(lloyd_max(width, self.bits), dtype=torch.float32)
        self.edges = ((self.centroids[1:] + self.centroids[:-1]) / 2).tolist()
        self.lookup = Lookup(self.centroids, self.bits)

    def encode(self, rows: Tensor) -> Codes:
        wide = rows.float()
        norm = _length(wide)
        unit = wide / torch.where(norm == 0, torch.ones_like(norm), norm).float().unsqueeze(-1)
        assert self.rotation is not None
        turned = self.rotation.forward(unit)
        codes = torch.zeros_like(turned, dtype=torch.uint8)
        for edge in self.edges:  # at most 15 passes, several times faster than a search per element
            codes += turned > edge
        made = {"codes": pack(codes, self.bits)}
        near = self.lookup(made["codes"], self.width)
        if self.norm_correction:
            norm = norm / _length(near)
        made["norm"] = self._half(norm)
        if self.sketch is not None:
            error = turned - near
            made["signs"] = pack((self.sketch.forward(error) > 0).to(torch.uint8), 1)
            made["error"] = self._half(norm * _length(error))
        return made

    def rotated(self, codes: Codes) -> Tensor:
        rows = self.lookup(codes["codes"], self.width) * codes["norm"].float().unsqueeze(-1)
        if self.sketch is None:
            return rows
        signs = unpack(codes["signs"], 1, self.width).float() * 2 - 1
        factor = codes["error"].float() * (SQRT_HALF_PI / math.sqrt(self.width))
        return rows + self.sketch.backward(signs) * factor.unsqueeze(-1)

    def _half(self, lengths: Tensor) -> Tensor:
        half = lengths.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise CompressorFault(f"{self.label}: a vector is longer than 65504, the most float16 can say")
        return half


class UniformCodec(SpaceCodec):
    """Min/max codes over each whole vector, not rotated: the value path of some serving engines.

    Codes: ``codes`` uint8 ``[kv_heads, tokens, ceil(width * bits / 8)]``, ``scale`` and ``low``
    ``[kv_heads, tokens]`` in the model's dtype.
    """

    def __init__(self, width: int, bits: int, label: str = "turboquant") -> None:
        self.width, self.bits, self.label = width, bits, label

    def encode(self, rows: Tensor) -> Codes:
        codes, scale, low = quantize(rows, self.bits, self.label)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def rotated(self, codes: Codes) -> Tensor:
        return dequantize(unpack(codes["codes"], self.bits, self.width), codes["scale"], codes["low"])


class Lookup:
    """Packed codes to centroids without unpacking: several codes by one look into a table.

    A table entry is a byte's worth of centroids, for 3 bits that of 12 bits.
    """

    def __init__(self, centroids: Tensor, bits: int) -> None:
        self.bits, self.width = bits, 8 if 8 % bits == 0 else 12
        entries, per_entry = torch.arange(1 << self.width), self.width // bits
        codes = (entries.unsqueeze(1) >> torch.arange(per_entry) * bits) & ((1 << bits) - 1)
        self.table = centroids[codes]

    def __call__(self, packed: Tensor, count: int) -> Tensor:
        """``[..., bytes]`` -> float32 ``[..., count]``."""
        index = packed.int()
        if self.width == 12:
            three = torch.nn.functional.pad(index, (0, -index.shape[-1] % 3)).view(*index.shape[:-1], -1, 3)
            word = three[..., 0] + three[..., 1] * 256 + three[..., 2] * 65536
            index = torch.stack([word & 0xFFF, word >> 12], -1)
        rows = self.table.to(packed.device).index_select(0, index.flatten())
        return rows.view(*packed.shape[:-1], -1)[..., :count]


def _length(rows: Tensor) -> Tensor:
    """Euclidean length in float64, ``[...]``: no overflow, and no trace of the order of summation in float16."""
    lengths: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return lengths
