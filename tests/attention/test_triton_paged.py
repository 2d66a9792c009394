"""The Triton kernel of the law beside its reference; on a machine without CUDA in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import engine, prompt
from tests.sdk.making import descriptor
from tests.watch import assert_same, same_bits
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, attend_reference
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.errors import ConfigError
from vericache_core.kv import LayerDescriptor
from vericache_core.runtime.backend import choose_attention
from vericache_core.runtime.sampling_params import SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
from vericache_core.attention.triton_paged import CHUNK, attend_triton

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's numpy, with NaN
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (16, 40)]
HEADS = [(2, 2), (6, 2), (4, 1), (14, 2)]
"""Query heads and KV heads: MHA, GQA, MQA, and a group that is no power of two."""


def paged(layer: LayerDescriptor, counts: Sequence[int], seed: int, poison: float = float("nan")) -> PagedRows:
    """Pages with ``counts[h]`` random rows per KV head; what lies beyond is ``poison``."""
    pages = PagedRows(layer, DEVICE)
    pages.reserve(max(counts) + PAGE)
    for number in range(pages.capacity // PAGE):
        for part in pages.page(number):
            part.fill_(poison)
    draw = torch.Generator().manual_seed(seed)
    for head, count in enumerate(counts):
        keys, values = (torch.randn(count, width, generator=draw) for width in (layer.head_dim, layer.value_dim))
        pages.put_head(head, keys.to(DEVICE, layer.dtype), values.to(DEVICE, layer.dtype))
    pages.lengths = np.array(counts, dtype=np.int64)
    return pages


def new_rows(layer: LayerDescriptor, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, layer.heads, layer.head_dim, generator=draw) * layer.scaling
    keys = torch.randn(rows, layer.kv_heads, layer.head_dim, generator=draw).to(layer.dtype)
    values = torch.randn(rows, layer.kv_heads, layer.value_dim, generator=draw).to(layer.dtype)
    return query.to(DEVICE), keys.to(DEVICE), values.to(DEVICE)


def both(layer: LayerDescriptor, rows: int, seed: int, make: Any) -> tuple[Tensor, Tensor, list[AttentionJob]]:
    """Kernel's and reference's answer to the same jobs over caches of their own, and the kernel's jobs."""
    found = []
    for attend in (attend_triton, attend_reference):
        query, keys, values = new_rows(layer, rows, seed)
        jobs = make()
        found.append((attend(query, keys, values, jobs), jobs))
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        for head in range(layer.kv_heads):
            stop = int(mine.base[head]) + mine.count
            for a, b in zip(mine.pages.rows(0, stop, head), theirs.pages.rows(0, stop, head), strict=True):
                assert same_bits(a, b)  # what was stored
    return found[0][0], found[1][0], found[0][1]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_agrees_with_the_reference(widths: tuple[int, int], heads: tuple[int, int]) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float16][(widths[0] + heads[0]) % 3]
    layer = descriptor(heads=heads[0], kv_heads=heads[1], head_dim=widths[0], value_dim=widths[1], dtype=dtype)
    ragged, even = [3, 151][: heads[1]], [131] * heads[1]

    def jobs() -> list[AttentionJob]:
        first, second = paged(layer, ragged, 1), paged(layer, even, 2)
        return [AttentionJob(0, 2, first, first.lengths, 151), AttentionJob(3, 1, second, second.lengths, 131)]

    found, expected, _ = both(layer, 5, 3, jobs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not found[2].any()
    assert not found[4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "counts", [(0, 0), (0, 129), (1, 0), (PAGE, PAGE - 1), (CHUNK, 1), (CHUNK + 3, 2 * CHUNK - 1)], ids=str
)
def test_ragged_empty_and_full_maps(counts: tuple[int, int], dtype: torch.dtype) -> None:
    """The draft step over what a token dropper left: a length of its own per KV head."""
    layer = descriptor(heads=4, head_dim=16, dtype=dtype)

    def jobs() -> list[AttentionJob]:
        pages = paged(layer, counts, 5)
        return [AttentionJob(1, 1, pages, pages.lengths, max(counts))]

    found, expected, _ = both(layer, 2, 4, jobs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 5, PAGE + 3])
@pytest.mark.parametrize("position", [0, PAGE - 2, CHUNK + 1])
def test_a_sliding_window_starts_where_it_should(position: int, window: int) -> None:
    layer = descriptor(window=window)

    def jobs() -> list[AttentionJob]:
        pages = paged(layer, (position, position), 4)
        pages.release_before(position - window + 1)  # released pages must not be touched
        return [AttentionJob(1, 3, pages, pages.lengths, position, window)]

    found = []
    for attend in (attend_triton, attend_reference):
        query, keys, values = new_rows(layer, 4, seed=3)
        found.append(attend(query, keys, values, jobs()))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    layer = descriptor(heads=6, dtype=dtype)
    length, count = CHUNK - 2, 5
    query, keys, values = new_rows(layer, 9, seed=7)
    alone, pages = [], paged(layer, (length, length), 8)
    for row in range(count):
        part = [torch.zeros_like(tensor) for tensor in (query, keys, values)]
        for target, tensor in zip(part, (query, keys, values), strict=True):
            target[0] = tensor[row]
        alone.append(attend_triton(part[0], part[1], part[2], [AttentionJob(0, 1, pages, pages.lengths, length + row)])[0])
        pages.grow_lengths(1)
    for first, neighbour in ((0, 0), (3, 2 * CHUNK + 5)):
        again = paged(layer, (length, length), 8, poison=1e4)
        part = list(new_rows(layer, 9, seed=10))
        for target, tensor in zip(part, (query, keys, values), strict=True):
            target[first : first + count] = tensor[:count]
        jobs = [AttentionJob(first, count, again, again.lengths, length)]
        if neighbour:
            other = paged(layer, (neighbour, 3), 9)
            jobs.insert(0, AttentionJob(0, 2, other, other.lengths, neighbour))
        found = attend_triton(part[0], part[1], part[2], jobs)
        assert same_bits(found[first : first + count], torch.stack(alone))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_that_are_not_seen_contribute_exactly_nothing(poison: float) -> None:
    layer = descriptor()
    query, keys, values = new_rows(layer, 2, seed=5)
    bits = []
    for fill in (0.0, poison):
        pages = paged(layer, (PAGE + 7, 9), 6, poison=fill)
        bits.append(attend_triton(query, keys, values, [AttentionJob(0, 2, pages, pages.lengths, PAGE + 7)]))
    assert same_bits(bits[0], bits[1])
    assert torch.isfinite(bits[1]).all()


@pytest.mark.parametrize("where", [0, 1], ids=["key", "value"])
def test_nan_in_a_row_that_is_seen_shows(where: int) -> None:
    layer = descriptor()
    query, keys, values = new_rows(layer, 2, seed=5)
    pages = paged(layer, (20, 20), 6)
    part = pages.page(0)[where]
    part[(0, 3, 11) if where == 0 else (0, 11, 3)] = float("nan")
    found = attend_triton(query, keys, values, [AttentionJob(0, 1, pages, pages.lengths, 20)])
    assert torch.isnan(found[0, 0]).any()
    assert torch.isfinite(found[0, 2:]).all()  # the other KV head


def test_a_compressed_prefix_comes_first() -> None:
    """Prefix and tail together give what one cache with all rows gives."""
    layer = descriptor()
    before = [torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2)]

    class Prefix:
        def parts(self) -> None:
            """It attends by itself."""

        def attend(self, query: Tensor, state: AttentionState) -> None:
            state.fold(query, *before)

    query, keys, values = new_rows(layer, 3, seed=2)
    tail = paged(layer, (5, 5), 3)
    whole = PagedRows(layer, DEVICE)
    whole.append(*before)
    whole.append(*tail.rows(0, 5))
    found = attend_triton(query, keys, values, [AttentionJob(1, 1, tail, tail.lengths, 45, None, Prefix())])
    expected = attend_triton(query, keys, values, [AttentionJob(1, 1, whole, whole.lengths, 45)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e3, 1e18])
def test_scores_far_apart_neither_overflow_nor_vanish(scale: float) -> None:
    layer = descriptor()
    answers = []
    for attend in (attend_triton, attend_reference):
        query, keys, values = new_rows(layer, 2, seed=11)
        pages = paged(layer, (PAGE + 3, PAGE + 3), 12)
        answers.append(attend(query * scale, keys, values, [AttentionJob(0, 1, pages, pages.lengths, PAGE + 3)]))
    assert torch.isfinite(answers[0]).all()
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)


def test_no_jobs_give_zeros() -> None:
    query, keys, values = new_rows(descriptor(), 2, seed=0)
    assert not attend_triton(query, keys, values, []).any()


@pytest.mark.parametrize("compressor", ["random", pytest.param("adversarial", marks=pytest.mark.slow)])
def test_an_engine_over_the_kernel_changes_no_bit(compressor: str) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("benchmarks/gpu.py runs engines on a GPU")
    settings: dict[str, Any] = {"keep": 0.5} if compressor == "random" else {}
    ours = engine("llama", attention="triton", compressor=compressor, full_kv="host", rows=4, window=2, **settings)
    params = SamplingParams(max_new_tokens=5)
    with ours:
        expected = ours.generate([prompt(9)], params, compressor=None, record_logits=True)
        assert_same(ours.generate([prompt(9)], params, record_logits=True)[0], expected[0])
    assert ours.attention == "triton"


def test_the_cpu_is_refused_outside_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="CUDA devices only"):
        choose_attention("triton", torch.device("cpu"))


def test_auto_takes_triton_where_a_kernel_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for launches in (True, False):
        monkeypatch.setattr("vericache_core.attention.fused._launches", lambda _, launches=launches: launches)
        assert choose_attention("auto", cuda)[0] == ("triton" if launches else "reference")
        assert choose_attention("auto", cpu)[0] != "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_cannot_launch_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_attention("auto", torch.device("cuda", 7))[0] == "reference"
    assert "Triton cannot run a kernel on cuda:7" in caplog.text
