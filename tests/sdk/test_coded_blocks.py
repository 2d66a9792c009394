"""Attending to codes decodes them block by block, and a block is gone before the next one is decoded."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from tests.sdk.making import cache, descriptor
from vericache_core.attention.online import AttentionState
from vericache_core.coded import Codec, CodedLayer, CodedRows, Codes
from vericache_core.context import CompressContext
from vericache_core.index_map import HeadMap
from vericache_core.kv import PrefixView


class Watch:
    """Counts the tokens of decoded blocks that are in memory at once, through any view of them."""

    def __init__(self) -> None:
        self.alive = self.peak = self.blocks = 0

    def made(self, rows: Tensor) -> Tensor:
        array = rows.numpy().copy()  # torch holds on to it as long as the storage lives
        self.blocks += 1
        self.alive += rows.shape[1]
        self.peak = max(self.peak, self.alive)
        weakref.finalize(array, self._gone, rows.shape[1])
        return torch.from_numpy(array)

    def _gone(self, tokens: int) -> None:
        self.alive -= tokens


class Halves(Codec):
    """Stores float16; ``unit`` tokens together."""

    def __init__(self, unit: int, watch: Watch) -> None:
        self.unit, self.watch = unit, watch

    def encode(self, rows: Tensor) -> Codes:
        return {"rows": rows.reshape(rows.shape[0], -1, self.unit, rows.shape[2]).half()}

    def decode(self, codes: Codes) -> Tensor:
        return self.watch.made(codes["rows"].float().flatten(1, 2))


@pytest.mark.parametrize(("key_boundary", "value_boundary"), [(1000, 1000), (960, 871), (300, 1000), (64, 0)])
def test_one_block_at_a_time(key_boundary: int, value_boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vericache_core.coded.SEGMENT_TOKENS", 200)
    keys_seen, values_seen = Watch(), Watch()
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 1000, 16, generator=draw) for _ in range(2))
    layer = CodedLayer(
        CodedRows(Halves(4, keys_seen), (), keys[:, :0]).appended(keys, key_boundary),
        CodedRows(Halves(1, values_seen), (), values[:, :0]).appended(values, value_boundary),
        HeadMap.everything(1000, 2),
    )
    layer.block = 64
    query, state = torch.randn(4, 3, 16, generator=draw), AttentionState.fresh(4, 3, 16)
    layer.attend(query, state)
    for seen, boundary in ((keys_seen, key_boundary), (values_seen, value_boundary)):
        assert seen.blocks >= boundary / 64
        assert seen.peak <= 64
        assert seen.alive == 0
    whole = AttentionState.fresh(4, 3, 16)
    whole.fold(query, layer.keys.decoded(), layer.values.decoded())
    torch.testing.assert_close(state.output(), whole.output())


@pytest.mark.parametrize("name", ["kivi", "turboquant"])
def test_the_compressors_decode_one_block_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = pytest.importorskip(f"vericache_compressor_{name}", reason=f"the {name} compressor is not installed")
    layers = [descriptor(head_dim=32)]
    compressor = plugin.KiviCompressor() if name == "kivi" else plugin.TurboQuantCompressor()
    layer = compressor.compress(PrefixView.from_tensors(layers, *cache(layers, 1000)), CompressContext()).layers[0]
    layer.block = 128
    watches = []
    for codec in (layer.keys.codec, layer.values.codec):
        watch, decode = Watch(), codec.decode if name == "kivi" else codec.rotated
        monkeypatch.setattr(codec, decode.__name__, lambda codes, watch=watch, decode=decode: watch.made(decode(codes)))
        watches.append(watch)
    layer.attend(torch.randn(4, 1, 32), AttentionState.fresh(4, 1, 32))
    assert all(watch.blocks > 5 and watch.peak == 128 and watch.alive == 0 for watch in watches)
