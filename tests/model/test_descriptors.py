"""What a compressor is told of each layer is what the model does."""

from __future__ import annotations

import pytest
import torch

from tests.models import engine


@pytest.mark.parametrize(
    ("name", "windows", "rotary"),
    [
        ("llama", [None] * 3, 16),
        ("mistral", [8, 8, 8], 16),
        ("gemma3", [8, 8, None], 16),
        ("gpt2", [None] * 3, 0),
        ("phi3", [None] * 3, 8),
    ],
)
def test_kinds_windows_and_rotary_widths(name: str, windows: list[int | None], rotary: int) -> None:
    layers = engine(name).adapter.layers
    assert [layer.sliding_window for layer in layers] == windows
    assert [layer.kind for layer in layers] == ["full" if window is None else "sliding" for window in windows]
    assert {layer.rotary_dim for layer in layers} == {rotary}
    assert all((layer.rope_theta is None) == (rotary == 0) for layer in layers)
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert {(layer.heads, layer.head_dim, layer.value_dim, layer.dtype) for layer in layers} == {(4, 16, 16, torch.float32)}
    assert {layer.kv_heads for layer in layers} == {4 if name == "gpt2" else 2}


def test_gemma_tells_a_theta_per_layer_type() -> None:
    thetas = [layer.rope_theta for layer in engine("gemma3").adapter.layers]
    assert thetas == [10_000.0, 10_000.0, 1_000_000.0]
