"""Attention over packed codes in one compiled call, beside decoding and folding; bits that do not depend on company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="Numba is not installed")
import numba

from tests.sdk.making import descriptor
from tests.watch import same_bits
from vericache_core.attention.layouts import CodeLayout
from vericache_core.attention.numba_codes import start_numba
from vericache_core.attention.numba_kernel import attend_numba
from vericache_core.attention.numba_products import HAVE_DOT, LOG2_E
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, attend_reference, start_state
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.coded import Codec, CodedLayer, CodedRows, Codes
from vericache_core.index_map import HeadMap
from vericache_core.kv import LayerDescriptor
from vericache_core.minmax import dequantize, quantize
from vericache_core.packing import pack, unpack

Form = Literal["token-groups", "channel-groups", "table"]
DOT_TOLERANCE = 2.0**-6
"""Of the dot form: queries, decoded numbers and weights have 8 bits each; values are normally distributed."""


class Coded(Codec):
    """A codec of any form and width; ``group`` is the whole width for a table."""

    def __init__(self, form: Form, bits: int, group: int) -> None:
        self.form, self.bits, self.group = form, bits, group
        self.unit = group if form == "token-groups" else 1
        levels = torch.arange(1 << bits).float()
        self.table = ((levels - levels.mean()) * (4 / len(levels))).cos()
        self.layout = CodeLayout(form, bits, group, self.table if form == "table" else None)

    def encode(self, rows: Tensor) -> Codes:
        kv_heads, tokens, width = rows.shape
        if self.form == "table":
            codes = (rows.float().abs() * 7).to(torch.int64).remainder(1 << self.bits).to(torch.uint8)
            return {"codes": pack(codes, self.bits), "scale": (rows.float().abs().amax(-1) + 0.5).half()}
        if self.form == "token-groups":
            groups = rows.reshape(kv_heads, tokens // self.unit, self.unit, width).transpose(2, 3).contiguous()
        else:
            groups = rows.reshape(kv_heads, tokens, width // self.group, self.group)
        codes, scale, low = quantize(groups, self.bits, "test")
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, codes: Codes) -> Tensor:
        if self.form == "table":
            return self.table[unpack(codes["codes"], self.bits, self.group).long()] * codes["scale"].float().unsqueeze(-1)
        groups = dequantize(unpack(codes["codes"], self.bits, self.group), codes["scale"], codes["low"])
        return groups.transpose(2, 3).flatten(1, 2) if self.form == "token-groups" else groups.flatten(2)


def coded(
    layer: LayerDescriptor, keys: Codec, values: Codec, tokens: int, exact: tuple[int, int] = (0, 0), seed: int = 0
) -> CodedLayer:
    """Random rows, of which the newest ``exact`` keys and values (at least) are no codes."""
    draw = torch.Generator().manual_seed(seed)
    streams = []
    for codec, width, rest in ((keys, layer.head_dim, exact[0]), (values, layer.value_dim, exact[1])):
        rows = torch.randn(layer.kv_heads, tokens, width, generator=draw).to(layer.dtype)
        streams.append(CodedRows(codec, (), rows[:, :0]).appended(rows, max(0, tokens - rest)))
    return CodedLayer(streams[0], streams[1], HeadMap.everything(tokens, layer.kv_heads))


def queries(layer: LayerDescriptor, rows: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, layer.heads, layer.head_dim, generator=draw).to(layer.dtype)


def job(layer: LayerDescriptor, prefix: Any, first: int, count: int) -> AttentionJob:
    pages = PagedRows(layer, torch.device("cpu"))
    return AttentionJob(first, count, pages, pages.lengths, prefix.tokens, None, prefix)


def check(layer: LayerDescriptor, prefix: CodedLayer, *, dot: bool, rows: int = 3) -> None:
    """The state of the kernel is that of decoding and folding."""
    assert prefix.parts() is not None
    query, jobs = queries(layer, rows + 2), [job(layer, prefix, 1, rows)]
    state = start_state(query, layer.value_dim, jobs, layer.scaling)
    numbers = start_numba(query, layer.kv_heads, layer.value_dim, jobs, layer.scaling, dot=dot)
    top, total, acc = (torch.from_numpy(part) for part in numbers)
    mine = slice(1, 1 + rows)
    expected = state.acc[mine] / state.total[mine].unsqueeze(-1)
    found = acc[mine] / total[mine].unsqueeze(-1)
    near = DOT_TOLERANCE if dot else 2e-5
    torch.testing.assert_close(found, expected, atol=near, rtol=near)
    torch.testing.assert_close(top[mine] / LOG2_E, state.top[mine], atol=4 * near, rtol=near)
    assert not acc[0].any()
    assert not acc[rows + 1 :].any()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("vericache_core.coded.SEGMENT_TOKENS", 200)
    return iter(())


WITH_DOT = pytest.mark.skipif(not HAVE_DOT, reason="no AVX-512 BF16")
DOT = [pytest.param(False, id="float32"), pytest.param(True, id="dot", marks=WITH_DOT)]
USUAL: tuple[Form, Form] = ("token-groups", "channel-groups")


@pytest.mark.parametrize("dot", DOT)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("forms", [USUAL, USUAL[::-1]], ids=["usual", "other"])
def test_groups(forms: tuple[Form, Form], group: int, bits: int, *, dot: bool) -> None:
    if group * bits % 8:
        pytest.skip("groups do not fill bytes")
    layer = descriptor(heads=6, head_dim=64, dtype=torch.bfloat16)
    check(layer, coded(layer, Coded(forms[0], bits, group), Coded(forms[1], bits, group), 300, (40, 37)), dot=dot)


@pytest.mark.parametrize("dot", DOT)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [16, 20, 40, 64])
def test_tables(width: int, bits: int, *, dot: bool) -> None:
    layer = descriptor(heads=6, head_dim=width, dtype=torch.bfloat16)
    codec = Coded("table", bits, width)
    check(layer, coded(layer, codec, codec, 301, (7, 7)), dot=dot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize("exact", [(0, 0), (0, 1), (33, 0), (500, 500), (5, 129)], ids=str)
def test_every_kind_of_boundary(exact: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    layer = descriptor(heads=6, head_dim=32, value_dim=48, dtype=dtype)
    prefix = coded(layer, Coded("token-groups", 4, 16), Coded("channel-groups", 2, 16), tokens, exact)
    for dot in {False, HAVE_DOT and dtype == torch.bfloat16}:
        check(layer, prefix, dot=dot)


@pytest.mark.parametrize("dot", DOT)
def test_segments_and_a_rollback(small_segments: None, *, dot: bool) -> None:
    layer = descriptor(heads=6, head_dim=64, dtype=torch.bfloat16)
    prefix = coded(layer, Coded("token-groups", 2, 32), Coded("channel-groups", 4, 32), 1000, (50, 51))
    assert len(prefix.keys.segments) > 3
    check(layer, prefix, dot=dot)
    for left in (927, 505, 3):
        cut = CodedLayer(prefix.keys.cut(left, 0, None), prefix.values.cut(left, 0, None), HeadMap.everything(left, 2))
        check(layer, cut, dot=dot)
        draw = torch.Generator().manual_seed(left)
        more = [torch.randn(2, 200, 64, generator=draw).bfloat16() for _ in range(2)]  # codes after a unit that was cut
        grown = [rows.appended(new, left + 150) for rows, new in zip((cut.keys, cut.values), more, strict=True)]
        check(layer, CodedLayer(grown[0], grown[1], HeadMap.everything(left + 200, 2)), dot=dot)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 700),
    exact=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 4),
    widths=st.tuples(st.sampled_from([8, 16, 30, 64, 96]), st.sampled_from([16, 32, 80, 128])),
    bits=st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])),
    group=st.sampled_from([4, 8, 16, 24, 32]),
    rows=st.integers(1, 19),
)
def test_random_shapes(
    tokens: int,
    exact: tuple[int, int],
    kv_heads: int,
    shared: int,
    widths: tuple[int, int],
    bits: tuple[int, int],
    group: int,
    rows: int,
) -> None:
    heads, dtype = kv_heads * shared, torch.bfloat16
    layer = descriptor(heads=heads, kv_heads=kv_heads, head_dim=widths[0], value_dim=widths[1], dtype=dtype)
    values = Coded("channel-groups", bits[1], group if widths[1] % group == 0 else 4)
    prefix = coded(layer, Coded("token-groups", bits[0], group), values, tokens, exact, seed=tokens)
    for dot in {False, HAVE_DOT}:
        check(layer, prefix, dot=dot, rows=rows)


def kivi_like(layer: LayerDescriptor, tokens: int, seed: int, bits: int = 4) -> CodedLayer:
    return coded(layer, Coded("token-groups", bits, 32), Coded("channel-groups", bits, 32), tokens, (tokens % 128, 128), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Of a prefix and pages after it: alone, with rows of its own request, with other requests, on other threads."""
    layer = descriptor(heads=6, head_dim=64, dtype=dtype)
    prefix, other = kivi_like(layer, 333, seed=1), kivi_like(layer, 1000, seed=2, bits=2)
    query, keys, values = queries(layer, 40), queries(layer, 40, 2)[:, :2], queries(layer, 40, 3)[:, :2]

    def tail() -> PagedRows:
        pages = PagedRows(layer, torch.device("cpu"))
        draw = torch.Generator().manual_seed(9)
        pages.append(*(torch.randn(2, 130, 64, generator=draw).to(dtype) for _ in range(2)))
        return pages

    def attended(first: int, count: int, place: int, neighbour: CodedLayer | None) -> Tensor:
        """Rows ``first`` on, of one request, at ``place`` of a step of 40 rows."""
        q, k, v = queries(layer, 40, 4), queries(layer, 40, 5)[:, :2].clone(), queries(layer, 40, 6)[:, :2].clone()
        mine = slice(place, place + count)
        q[mine], k[mine], v[mine] = (rows[first : first + count] for rows in (query, keys, values))
        pages = tail()
        for row in range(first):
            pages.append(*(rows[row].unsqueeze(1) for rows in (keys, values)))
        jobs = [AttentionJob(place, count, pages, pages.lengths, 333 + 130 + first, None, prefix)]
        if neighbour is not None:
            beside = tail()
            jobs.insert(0, AttentionJob(0, place, beside, beside.lengths, neighbour.tokens + 130, None, neighbour))
        return attend_numba(q, k, v, jobs, layer.scaling)[mine]

    one_by_one = torch.cat([attended(row, 1, 0, None) for row in range(20)])
    assert torch.isfinite(one_by_one).all()
    threads = numba.get_num_threads()
    try:
        for count, place, beside in ((20, 0, None), (20, 20, None), (7, 1, other), (20, 17, other)):
            numba.set_num_threads(threads if place else 1)
            assert same_bits(attended(0, count, place, beside), one_by_one[:count]), (count, place)
    finally:
        numba.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefixes_and_pages_beside_the_reference(dtype: torch.dtype) -> None:
    """Requests with codes, without a prefix, and with one that only its own code can attend to, in one step."""
    layer = descriptor(heads=6, head_dim=64, dtype=dtype)

    class Own(CodedLayer):
        def attend(self, query: Tensor, state: AttentionState) -> None:
            state.fold(query, self.keys.decoded() * 0.5, self.values.decoded())

    first, last = kivi_like(layer, 500, seed=1), kivi_like(layer, 140, seed=2, bits=2)
    own = Own(last.keys, last.values, last.surviving)
    assert own.parts() is None
    query, keys, values = queries(layer, 12), queries(layer, 12, 2)[:, :2], queries(layer, 12, 3)[:, :2]
    found = []
    for attend in (attend_numba, attend_reference):
        jobs = [job(layer, first, 0, 3), job(layer, last, 4, 1), job(layer, own, 5, 2)]
        pages = PagedRows(layer, torch.device("cpu"))
        jobs.append(AttentionJob(8, 4, pages, pages.lengths, 0))
        found.append(attend(query, keys, values, jobs, layer.scaling))
    near = DOT_TOLERANCE if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found[0], found[1], atol=near, rtol=near)


def test_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = descriptor(heads=6, head_dim=64)
    prefix = kivi_like(layer, 500, seed=1)

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("codes were decoded")

    for rows in (prefix.keys, prefix.values):
        monkeypatch.setattr(rows.codec, "decode", refuse)
    top, _, acc = start_numba(queries(layer, 1), 2, 64, [job(layer, prefix, 0, 1)], 1.0, dot=False)
    assert np.isfinite(top).all()
    assert acc.any()


def test_what_is_not_as_promised_is_never_read_by_address() -> None:
    """A kernel follows addresses blindly: a wrong shape, dtype, device or step must not get that far."""
    layer = descriptor(heads=6, head_dim=64)

    def altered(**changes: Any) -> CodedLayer:
        prefix = kivi_like(layer, 500, seed=1)
        codes = prefix.keys.segments[0].codes
        assert isinstance(codes, dict)
        for name, change in changes.items():
            codes[name] = change(codes[name])
        return prefix

    assert altered().parts() is not None
    assert altered(codes=lambda part: part[:, :-1].contiguous()).parts() is None
    assert altered(codes=lambda part: part.transpose(0, 1).contiguous().transpose(0, 1)).parts() is None
    assert altered(codes=lambda part: part.view(torch.int8)).parts() is None
    assert altered(scale=lambda part: part[..., :-1].contiguous()).parts() is None
    assert altered(scale=lambda part: part.double()).parts() is None
    assert altered(low=lambda part: part.half()).parts() is None
    assert altered(low=lambda part: part[..., :-1].contiguous()).parts() is None
    assert altered(low=lambda part: part.to("meta")).parts() is None
    assert altered(scale=lambda part: part.double(), low=lambda part: part.double()).parts() is None
    nowhere = kivi_like(layer, 500, seed=1)
    nowhere.values.codec.layout = None
    assert nowhere.parts() is None


def test_a_prefix_of_another_shape_is_left_to_its_own_code() -> None:
    """Which will raise, and the fault will be its request's."""
    layer, other = descriptor(heads=6, head_dim=64), descriptor(heads=6, head_dim=32)
    prefix = kivi_like(other, 200, seed=1)
    with pytest.raises(RuntimeError, match=r"must match|Expected"):
        start_numba(queries(layer, 1), 2, 64, [job(layer, prefix, 0, 1)], 1.0, dot=False)
