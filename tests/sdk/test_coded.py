from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.making import RoundCodec, RoundQuantizer, cache, descriptor, stored_bytes, view
from vericache_core.coded import SEGMENT_TOKENS, Codec, CodedLayer, CodedRows, Codes
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV

LAYERS = [descriptor(0), descriptor(1, window=8), descriptor(2, kv_heads=1, head_dim=8, value_dim=12, dtype=torch.bfloat16)]
CONTEXT = CompressContext()


def layer_of(compressed: CompressedKV, index: int = 0) -> CodedLayer:
    layer = compressed.layers[index]
    assert isinstance(layer, CodedLayer)
    return layer


def decoded(compressed: CompressedKV) -> list[torch.Tensor]:
    held = [layer for layer in compressed.layers if isinstance(layer, CodedLayer)]
    return [rows.decoded() for layer in held for rows in (layer.keys, layer.values)]


@given(
    st.sampled_from([1, 3, 4]),
    st.sampled_from([8, 12]),
    st.lists(st.sampled_from([1, 2, 7, 25]), min_size=1, max_size=12),
    st.integers(0, 30),
)
def test_appended_in_chunks_equals_one_shot_in_bytes(unit: int, residual: int, chunks: list[int], prompt: int) -> None:
    compressor = RoundQuantizer(unit, residual)
    kv = cache(LAYERS, prompt + sum(chunks))
    grown = compressor.compress(view(LAYERS, kv, 0, prompt), CONTEXT)
    at = prompt
    for chunk in chunks:
        grown = compressor.extend(grown, view(LAYERS, kv, at, at + chunk), CONTEXT)
        at += chunk
    grown.check_integrity()
    once = compressor.compress(view(LAYERS, kv, 0, at), CONTEXT)
    assert stored_bytes(grown) == stored_bytes(once)
    assert grown.nbytes == once.nbytes


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 30))
def test_rollback_with_prefix_restores_the_bytes_before_the_extend(prompt: int, more: int, kept: int) -> None:
    kept = min(kept, more)
    compressor, kv = RoundQuantizer(), cache(LAYERS, prompt + more)
    before = compressor.compress(view(LAYERS, kv, 0, prompt + kept), CONTEXT)
    grown = compressor.extend(before, view(LAYERS, kv, prompt + kept, prompt + more), CONTEXT)
    back = compressor.rollback(grown, more - kept, view(LAYERS, kv, 0, prompt + kept))
    back.check_integrity()
    assert stored_bytes(back) == stored_bytes(before)


@given(st.integers(1, 60), st.integers(0, 60))
def test_rollback_without_prefix_leaves_the_rest_as_it_was(tokens: int, dropped: int) -> None:
    dropped = min(dropped, tokens)
    compressor, kv = RoundQuantizer(), cache(LAYERS, tokens)
    full = compressor.compress(view(LAYERS, kv, 0, tokens), CONTEXT)
    back = compressor.rollback(full, dropped)
    assert back.tokens == tokens - dropped
    for left, right in zip(decoded(back), decoded(full), strict=True):
        assert torch.equal(left, right[:, : tokens - dropped])


@settings(max_examples=40)
@given(st.integers(1, 40), st.lists(st.integers(-20, 20).filter(bool), max_size=8))
def test_codes_are_never_encoded_again(prompt: int, moves: list[int]) -> None:
    """Append and roll back at will, never showing the prefix: codes that survive stay the same codes."""
    compressor, kv = RoundQuantizer(unit=4, residual=8), cache(LAYERS, 400)
    held = compressor.compress(view(LAYERS, kv, 0, prompt), CONTEXT)
    for move in moves:
        earlier = decoded(held)
        encoded = [rows.encoded_tokens for rows in (layer_of(held).keys, layer_of(held).values)]
        if move < 0:
            held = compressor.rollback(held, min(-move, held.tokens))
        else:
            held = compressor.extend(held, view(LAYERS, kv, held.tokens, held.tokens + move), CONTEXT)
        held.check_integrity()
        for number, rows in enumerate((layer_of(held).keys, layer_of(held).values)):
            both = min(encoded[number], rows.encoded_tokens, held.tokens)
            assert torch.equal(rows.decoded()[:, :both], earlier[number][:, :both])
            assert rows.encoded_tokens >= min(encoded[number], held.tokens)
    again = RoundQuantizer(unit=4, residual=8).rollback(held, 0)
    assert stored_bytes(again) == stored_bytes(held)


class CountingCodec(RoundCodec):
    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[int] = []

    def encode(self, rows: torch.Tensor) -> Codes:
        self.seen.append(rows.shape[1])
        return super().encode(rows)


def test_each_row_is_encoded_once() -> None:
    codec = CountingCodec()
    rows = CodedRows(codec, (), torch.zeros(1, 0, 4))
    for step in range(50):
        rows = rows.appended(torch.randn(1, 2, 4), max(0, 2 * step - 6))
    assert sum(codec.seen) == rows.encoded_tokens == 92


def test_segments_have_a_fixed_size_whatever_the_order_of_arrival() -> None:
    codec = RoundCodec(3)
    empty = CodedRows(codec, (), torch.zeros(1, 0, 2))
    data = torch.randn(1, 2 * SEGMENT_TOKENS + 100, 2, generator=torch.Generator().manual_seed(0))
    once = empty.appended(data, data.shape[1])
    first = SEGMENT_TOKENS - 1
    twice = empty.appended(data[:, :first], first).appended(data[:, first:], data.shape[1])
    capacity = SEGMENT_TOKENS // 3 * 3
    assert [s.tokens for s in once.segments] == [s.tokens for s in twice.segments]
    assert [s.tokens for s in once.segments][:2] == [capacity, capacity]
    assert torch.equal(once.decoded(), twice.decoded())


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 64])
def test_pieces_cover_the_rows_in_order(limit: int) -> None:
    kv = cache([LAYERS[0]], 50)
    rows = CodedRows(RoundCodec(4), (), kv[0][0][:, :0]).appended(kv[0][0], 41)
    at = 0
    for start, piece in rows.pieces(limit):
        assert start == at
        assert piece.shape[1] <= max(limit, 4) or start >= rows.encoded_tokens
        at += piece.shape[1]
    assert at == 50
    assert torch.equal(rows.decoded()[:, 40:], kv[0][0][:, 40:])


def test_key_and_value_blocks_line_up() -> None:
    compressor, kv = RoundQuantizer(unit=4, residual=16), cache(LAYERS, 77)
    held = layer_of(compressor.compress(view(LAYERS, kv, 0, 77), CONTEXT))
    held.block = 10  # smaller than any real block
    blocks = list(held.blocks())
    assert all(keys.shape[1] == values.shape[1] for keys, values in blocks)
    assert torch.equal(torch.cat([keys.to(torch.float32) for keys, _ in blocks], 1), held.keys.decoded())
    assert torch.equal(torch.cat([values.to(torch.float32) for _, values in blocks], 1), held.values.decoded())


def test_a_codec_may_have_one_unit_for_keys_and_another_for_values() -> None:
    class Wide(RoundQuantizer):
        def value_codec(self, layer: object) -> Codec:
            return RoundCodec(8)

    kv = cache(LAYERS, 72)
    made = Wide().compress(view(LAYERS, kv, 0, 72), CONTEXT)
    back = Wide().rollback(made, 14, view(LAYERS, kv, 0, 58))
    # 58 - 8 = 50 is no multiple of 8: the boundary falls to 48, as in a fresh compression.
    assert layer_of(back).values.encoded_tokens == 48
    assert stored_bytes(back) == stored_bytes(Wide().compress(view(LAYERS, kv, 0, 58), CONTEXT))


def test_unequal_streams_are_refused() -> None:
    kv = cache([LAYERS[0]], 5)
    held = layer_of(RoundQuantizer().compress(view([LAYERS[0]], kv, 0, 5), CONTEXT))
    with pytest.raises(ValueError, match="key rows"):
        CodedLayer(held.keys, held.values.cut(4, 0, None), held.surviving)
