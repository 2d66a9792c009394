"""Products in tiles: against float64, row by row in any company, and when they are chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vericache_core.model import packed

numba = pytest.importorskip("numba")
from vericache_core.model import numba_linear  # noqa: E402
from vericache_core.model.numba_linear import TiledLinear, multiply_reference, tileable  # noqa: E402

needs_pairs = pytest.mark.skipif(
    not tileable(torch.zeros((2, 2), dtype=torch.bfloat16)), reason="this CPU has no bfloat16 pairs, or something faster"
)
STEP = 2**-7
"""Relative: one step of bfloat16 at most, where sums in another order round the other way."""

RARELY = 0.02
"""Share of numbers that do round the other way; of those that were cut off and not rounded half would."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_pairs
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (63, 8), (64, 34), (65, 2), (130, 48), (960, 576)])
def test_products_are_those_of_float64_rounded_once(outputs: int, inputs: int, biased: bool) -> None:
    weight, bias = drawn(outputs, inputs, seed=1), drawn(outputs, seed=2) if biased else None
    product = TiledLinear(weight, bias)
    for rows in (1, 5, 6, 7, 13, 40):
        given = drawn(rows, inputs, seed=rows)
        expected, found = multiply_reference(given, weight, bias).double(), product(given).double()
        size = given.double().abs() @ weight.double().abs().T  # what cancels leaves the rounding of its parts
        assert ((found - expected).abs() <= STEP * expected.abs() + 1e-6 * size).all()
        assert (found != expected).double().mean() <= RARELY


@needs_pairs
@pytest.mark.parametrize("outputs", [64, 100, 704])
def test_a_row_has_the_same_bits_in_any_company_on_any_threads(outputs: int) -> None:
    product, rows = TiledLinear(drawn(outputs, 96, seed=3), drawn(outputs, seed=4)), drawn(29, 96, seed=5)
    alone = torch.cat([product(row.unsqueeze(0)) for row in rows])
    before = numba.get_num_threads()
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            for first in (0, 3):
                for count in range(1, 24):
                    assert torch.equal(product(rows[first : first + count]), alone[first : first + count])
    finally:
        numba.set_num_threads(before)


@needs_pairs
def test_nothing_is_written_beyond_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    product, rows = TiledLinear(drawn(70, 16, seed=6)), drawn(7, 16, seed=7)
    expected, guarded, kernel = product(rows), torch.full((12, 70), 5.0).bfloat16(), numba_linear._multiply

    def inside(count: int, pairs: int, outputs: int, source: int, panels: int, start: int, _: int, threads: int) -> None:
        for first in (6, 5, 4, 3, 2, 1, 0):  # the last row first: what is written beyond a row stays
            place = guarded.data_ptr() + (first + 2) * outputs * 2
            kernel(1, pairs, outputs, source + first * pairs * 4, panels, start, place, threads)

    monkeypatch.setattr(numba_linear, "_multiply", inside)
    product(rows)
    assert torch.equal(guarded[2:9], expected)
    assert (guarded[[0, 1, 9, 10, 11]] == 5).all()


@needs_pairs
def test_what_is_not_a_number_stays_in_its_row() -> None:
    product, rows = TiledLinear(drawn(70, 16, seed=6)), drawn(9, 16, seed=7)
    expected = product(rows)
    rows[4, 3], rows[7, 0] = float("nan"), float("inf")
    found = product(rows)
    assert found[4].isnan().all()
    assert (found[7].isinf() | found[7].isnan()).all()
    others = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(found[others], expected[others])


@needs_pairs
def test_rows_may_lie_anyhow() -> None:
    weight = drawn(20, 12, seed=8)
    product, wide = TiledLinear(weight), drawn(2, 5, 24, seed=9)
    found = product(wide[..., ::2])
    assert found.shape == (2, 5, 20)
    assert torch.equal(found, product(wide[..., ::2].contiguous()))
    assert torch.equal(found[1], product(wide[1, :, ::2]))


@needs_pairs
def test_a_product_keeps_its_weights() -> None:
    weight, rows = drawn(8, 4, seed=10), drawn(3, 4, seed=11)
    product = TiledLinear(weight)
    expected = product(rows)
    weight.zero_()
    assert torch.equal(product(rows), expected)


@needs_pairs
def test_tiles_are_chosen_for_bfloat16_pairs_and_left_to_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(8, 4)
    assert isinstance(packed.packed_product(weight, None, 8), TiledLinear)
    assert not isinstance(packed.packed_product(weight.float(), None, 8), TiledLinear)
    assert not tileable(drawn(8, 5))
    monkeypatch.setattr(numba_linear, "has_matrix_unit", lambda: True)
    assert not isinstance(packed.packed_product(weight, None, 8), TiledLinear)


def test_other_products_are_those_of_torch() -> None:
    draw = torch.Generator().manual_seed(12)
    weight, bias, rows = (torch.randn(shape, generator=draw) for shape in ((20, 12), (20,), (9, 12)))
    module = torch.nn.Linear(12, 20)
    if not packed.packable(module):
        pytest.skip("oneDNN has no packed products here")
    expected = torch.nn.functional.linear(rows, weight, bias)
    assert torch.allclose(packed.packed_product(weight, bias, 8)(rows), expected, atol=1e-5)
