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
from vericache_core.attention.layouts import CodeLayout
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
    """TurboQuant section 3.1 (algorithm 1): length, rotation, nearest centroid per coordinate.

    Codes (axis 1 counts tokens): ``codes`` uint8 ``[kv_heads, tokens, ceil(width * bits / 8)]``, ``scale``
    float16 ``[kv_heads, tokens]``. A coordinate decodes to ``scale * table[code]``, where the table holds the
    centroids of a unit vector times ``2 * sqrt(width)``: so a scale stays finite for every vector that float16
    itself can hold. With norm correction the scale contains the factor that gives the decoded vector the length
    of the original. Zero vectors come back as zeros.

    With ``sketch`` (section 3.2, algorithm 2, the QJL of the rounding error) one bit fewer goes into the
    centroids; ``signs`` uint8 ``[kv_heads, tokens, ceil(width / 8)]`` and ``sketch_scale`` float16 are added:
    the length of the error times ``sqrt(pi / 2) / sqrt(width)``. That factor belongs to an orthogonal sketch
    matrix; for a Gaussian one it would be ``sqrt(pi / 2) / width``, and mixing them up shrinks the correction
    to nothing.

    Args:
        width: head dimension.
        bits: bits per coordinate in all.
        rotation: of the vectors.
        label: who to name in an error.
        norm_correction: see above; not used with ``sketch``.
        sketch: rotation of the error, or ``None``.

    Raises:
        CompressorFault: the root mean square of a vector is beyond float16.
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
        centroids = torch.tensor(lloyd_max(width, self.bits), dtype=torch.float64)
        self.edges = ((centroids[1:] + centroids[:-1]) / 2).tolist()
        self.stretch = 2 * math.sqrt(width)
        table = (centroids * self.stretch).float()
        self.lookup = Lookup(table, self.bits)
        if sketch is None:  # the sketch has a rotation of its own, which no kernel applies
            self.layout = CodeLayout("table", self.bits, width, table)

    def encode(self, rows: Tensor) -> Codes:
        assert self.rotation is not None
        wide = rows.float()
        length = _length(wide)
        turned = self.rotation.forward(wide / torch.where(length == 0, 1.0, length).float().unsqueeze(-1))
        codes = torch.zeros_like(turned, dtype=torch.uint8)
        for edge in self.edges:  # at most 15 passes, several times faster than a search per element
            codes += turned > edge
        made = {"codes": pack(codes, self.bits)}
        near = self.lookup(made["codes"], self.width)
        made["scale"] = self._half(length / (_length(near) if self.norm_correction else self.stretch))
        if self.sketch is not None:
            error = turned - near / self.stretch
            made["signs"] = pack((self.sketch.forward(error) > 0).to(torch.uint8), 1)
            made["sketch_scale"] = self._half(length * _length(error) * (SQRT_HALF_PI / math.sqrt(self.width)))
        return made

    def rotated(self, codes: Codes) -> Tensor:
        rows = self.lookup(codes["codes"], self.width) * codes["scale"].float().unsqueeze(-1)
        if self.sketch is None:
            return rows
        signs = unpack(codes["signs"], 1, self.width).float() * 2 - 1
        return rows + self.sketch.backward(signs) * codes["sketch_scale"].float().unsqueeze(-1)

    def _half(self, scales: Tensor) -> Tensor:
        half = scales.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise CompressorFault(f"{self.label}: the elements of a vector are too large for a float16 scale")
        return half


class UniformCodec(SpaceCodec):
    """Min/max codes over each whole vector, not rotated: the value path of some serving engines.

    Codes: ``codes`` uint8 ``[kv_heads, tokens, ceil(width * bits / 8)]``, ``scale`` and ``low``
    ``[kv_heads, tokens]`` in the model's dtype.
    """

    def __init__(self, width: int, bits: int, label: str = "turboquant") -> None:
        self.width, self.bits, self.label = width, bits, label
        self.layout = CodeLayout("channel-groups", bits, width)

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
