"""A made-up full KV of one request, with the services a compressor may ask for: no model, milliseconds.

Everything is a pure function of the seed, so two processes see the same world.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from vericache_core.context import CompressContext, Needs, ScoreObserver
from vericache_core.kv import LayerDescriptor, PrefixView

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCORE_BLOCK: Final = 32


def layout(
    layers: int = 2,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    dtype: str = "float32",
    windows: Sequence[int | None] = (),
    rotary_dim: int | None = None,
    scaling: float | None = None,
) -> tuple[LayerDescriptor, ...]:
    """Descriptors of a made-up model; ``windows`` gives layers a sliding window, in turn."""
    made = []
    for index in range(layers):
        window = windows[index % len(windows)] if windows else None
        kind: Literal["full", "sliding"] = "full" if window is None else "sliding"
        made.append(
            LayerDescriptor(
                index=index,
                kind=kind,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim or head_dim,
                dtype=DTYPES[dtype],
                scaling=head_dim**-0.5 if scaling is None else scaling,
                sliding_window=window,
                rope_theta=10000.0,
                rotary_dim=head_dim if rotary_dim is None else rotary_dim,
            )
        )
    return tuple(made)


class World:
    """Keys, values and queries of ``tokens`` tokens in every layer.

    Args:
        layers: descriptors.
        tokens: how many tokens there are; a prefix of any length can be viewed.
        seed: of all numbers.
        flavour: ``normal`` rows, or one of the awkward ones that :func:`_rows` makes.
    """

    def __init__(self, layers: Sequence[LayerDescriptor], tokens: int, seed: int = 0, flavour: str = "normal") -> None:
        self.layers, self.tokens, self.seed = tuple(layers), tokens, seed
        self.token_ids = [(seed * 31 + position * 7 + 3) % 97 for position in range(tokens)]
        draw = torch.Generator().manual_seed(seed * 1_000_003 + 17)
        self._built: Any = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries: list[Tensor] = []
        for layer in self.layers:
            self.keys.append(_rows(flavour, (layer.kv_heads, tokens, layer.head_dim), draw).to(layer.dtype))
            self.values.append(_rows(flavour, (layer.kv_heads, tokens, layer.value_dim), draw).to(layer.dtype))
            self.queries.append((2 * torch.randn(layer.heads, tokens, layer.head_dim, generator=draw)).to(layer.dtype))

    def view(self, start: int, stop: int) -> PrefixView:
        """A view that hands out the originals themselves, so that a compressor that writes to them is caught."""

        def read(index: int) -> tuple[Tensor, Tensor]:
            return self.keys[index][:, start:stop], self.values[index][:, start:stop]

        return PrefixView(self.layers, self.token_ids[start:stop], read, start)

    def context(self, needs: Needs, tokens: int, seed: int = 0, protected: Sequence[tuple[int, int]] = ()) -> CompressContext:
        """The context of a ``compress`` call over the first ``tokens`` tokens; it offers what ``needs`` declares."""
        rows = min(needs.queries, tokens)
        return CompressContext(
            seed=seed,
            protected=tuple(protected),
            query_reader=(lambda index: self.queries[index][:, tokens - rows : tokens]) if needs.queries else None,
            mass_reader=(lambda index: self._mass(index, tokens)) if needs.attention_mass else None,
            score_runner=self._score if needs.scoring else None,
            encoder=lambda text: list(text.encode()),
            model_reader=self._model if needs.model else None,
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor that a compressor is shown and must leave alone."""
        return [*self.keys, *self.values, *self.queries]

    def remade(self, change: Callable[[Tensor], Tensor]) -> World:
        """A world whose tensors went through ``change`` (other strides, another batch layout)."""
        other = World(self.layers, 0, self.seed)
        other.tokens, other.token_ids = self.tokens, self.token_ids
        other.keys = [change(part) for part in self.keys]
        other.values = [change(part) for part in self.values]
        other.queries = [change(part) for part in self.queries]
        return other

    def _model(self) -> Any:
        """A tiny model of the same shape. Its own rows are not this world's; compressors that run it only rank with it."""
        from vericache_conform.models import shaped

        if self._built is None:
            self._built = shaped(self.layers, self.seed)
        return self._built

    def _mass(self, index: int, tokens: int) -> Tensor:
        layer = self.layers[index]
        queries = self.queries[index][:, :tokens].float() * layer.scaling
        keys = self.keys[index][:, :tokens].float().repeat_interleave(layer.group, 0)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        paid = torch.softmax((queries @ keys.transpose(1, 2)).masked_fill(hidden, float("-inf")), -1)
        return paid.sum(1)

    def _score(self, token_ids: Sequence[int], observer: ScoreObserver) -> None:
        for start in range(0, len(token_ids), SCORE_BLOCK):
            block = [int(token) for token in token_ids[start : start + SCORE_BLOCK]]
            for layer in self.layers:
                mark = zlib.crc32(repr((self.seed, start, block, layer.index)).encode())
                draw = torch.Generator().manual_seed(mark)
                queries = 2 * torch.randn(layer.heads, len(block), layer.head_dim, generator=draw)
                keys = torch.randn(layer.kv_heads, len(block), layer.head_dim, generator=draw)
                observer(layer.index, queries.to(layer.dtype), keys.to(layer.dtype))


def _rows(flavour: str, shape: tuple[int, int, int], draw: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=draw)
    if flavour == "normal":
        return noise
    if flavour == "ties":  # every token the same row: all scores are equal
        return noise[:, :1].expand(shape).contiguous() if shape[1] else noise
    if flavour == "zeros":
        return torch.zeros(shape)
    if flavour == "constant":
        return torch.full(shape, -3.0)
    if flavour == "large":
        return (noise * 2e4).clamp(-6e4, 6e4)  # just inside float16
    if flavour == "shifted":  # far from zero, little spread
        return noise * 0.1 + 20.0
    if flavour == "alternating":
        return torch.where(torch.arange(shape[1]) % 2 == 0, 1.0, -1.0)[None, :, None].expand(shape).contiguous()
    if flavour == "one-hot":
        made = torch.zeros(shape)
        made[:, torch.arange(shape[1]), torch.arange(shape[1]) % shape[2]] = 5.0
        return made
    raise ValueError(f"unknown flavour {flavour!r}")
