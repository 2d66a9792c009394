"""The step packer: rows in range, disjoint, in order, and nobody waits longer than one round of turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vericache_core.runtime.packer import pack
from vericache_core.runtime.request import Phase, Want

PHASES: dict[Phase, tuple[int, int]] = {"draft": (1, 1), "decode": (1, 1), "verify": (2, 40), "prefill": (1, 90)}


@st.composite
def wants(draw: st.DrawFn) -> list[tuple[int, Want]]:
    made = []
    for number in range(draw(st.integers(0, 40))):
        phase = draw(st.sampled_from(sorted(PHASES)))
        length = draw(st.integers(*PHASES[phase]))
        made.append((number, Want(phase, tuple(range(length)), draw(st.integers(0, 9)))))
    return made


@given(wants=wants(), rows=st.integers(2, 33))
def test_segments_are_disjoint_leading_parts_that_fill_the_step(wants: list[tuple[int, Want]], rows: int) -> None:
    segments = pack(wants, rows)
    at = 0
    for segment in segments:
        assert segment.first == at
        assert 1 <= segment.count <= len(segment.want.tokens)
        assert (segment.request, segment.want) in wants
        at += segment.count
    assert at == min(rows, sum(len(want.tokens) for _, want in wants))
    assert len({segment.request for segment in segments}) == len(segments)


@given(wants=wants(), rows=st.integers(2, 33))
def test_every_request_gets_a_row_before_the_turns_have_gone_round(wants: list[tuple[int, Want]], rows: int) -> None:
    served = set()
    for turn in range(len(wants)):
        served |= {segment.request for segment in pack(wants[turn:] + wants[:turn], rows)}
    assert served == set(range(len(wants)))


def test_many_single_rows_starve_no_block() -> None:
    crowd = [(number, Want("decode", (1,), 5)) for number in range(50)]
    block = (99, Want("prefill", tuple(range(40)), 0))
    (mine,) = [segment for segment in pack([*crowd, block], 16) if segment.request == 99]
    assert mine.count == 4


def test_one_single_row_waits_for_no_block() -> None:
    blocks = [(number, Want("verify", tuple(range(30)), 5)) for number in range(3)]
    segments = pack([*blocks, (9, Want("draft", (1,), 3))], 16)
    assert [(segment.request, segment.count) for segment in segments] == [(9, 1), (0, 15)]
