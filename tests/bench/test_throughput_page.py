"""The timeline of the benchmark's page, read back from its markup."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import pytest

from vericache_core.bench.throughput.measured import Measured, Trace
from vericache_core.bench.throughput.page import PHASES, html_page
from vericache_core.bench.throughput.rows import Record
from vericache_core.bench.throughput.svg import LANE, LEFT, RIGHT, TOP, WIDTH

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Bar:
    """A bar of the timeline; ``start`` and ``end`` in seconds."""

    lane: int
    kind: str
    start: float
    end: float
    height: float


def bars(page: str, seconds: float) -> list[Bar]:
    """Bars of the first timeline of ``page``, whose axis ends at ``seconds``; those of the legend left out."""
    drawn = next(text for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "Steps and swaps of each request" in text)
    kinds = {colour: kind for kind, colour in PHASES.items()}
    root, found = ET.fromstring(drawn), []
    lanes = sum(1 for text in root.iter(f"{SVG}text") if (text.text or "").startswith("request "))
    for rect in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        if y >= TOP + LANE * lanes:
            continue
        start, end = ((at - LEFT) / (WIDTH - LEFT - RIGHT) * seconds for at in (x, x + width))
        found.append(Bar(int((y - TOP) // LANE), kinds[rect.attrib["fill"]], start, end, height))
    return found


def page_of(trace: Trace) -> str:
    run = Measured(tokens=[[1]], decoded=1, decode_seconds=1.0, trace=trace)
    return html_page({}, [], [Record("vericache", "slow-host-30", True, runs={0: run})])


def test_every_span_has_a_bar_in_the_lane_of_its_request() -> None:
    trace = Trace(
        phases=[(0.0, 1.0, 0, "draft"), (0.0, 1.0, 1, "draft"), (1.0, 4.0, 0, "background"), (1.0, 3.0, 1, "draft")],
        swaps=[(1.0, 2.0, 0), (2.5, 3.5, 0)],
    )
    trace.phases.append((4.0, 5.0, 1, "verify"))
    drawn = bars(page_of(trace), 5.0)
    seen = {(bar.lane, bar.kind, round(bar.start, 1), round(bar.end, 1)) for bar in drawn}
    assert seen == {
        (0, "draft", 0.0, 1.0),
        (0, "background", 1.0, 4.0),
        (0, "swap", 1.0, 2.0),
        (0, "swap", 2.5, 3.5),
        (1, "draft", 0.0, 3.0),
        (1, "verify", 4.0, 5.0),
    }
    thin = {bar.kind for bar in drawn if bar.height < LANE / 2}
    assert thin == {"swap"}


@pytest.mark.parametrize(("gap", "expected"), [(1e-4, 2), (5.0, 501)])
def test_steps_of_a_phase_in_a_row_are_one_bar_unless_a_gap_could_be_seen(gap: float, expected: int) -> None:
    steps = [(number * (1.0 + gap), number * (1.0 + gap) + 1.0, 0, "draft") for number in range(500)]
    last = steps[-1][1]
    drawn = bars(page_of(Trace(phases=[*steps, (last, last + 1.0, 0, "verify")])), last + 1.0)
    counts = Counter(bar.kind for bar in drawn)
    assert counts["verify"] == 1
    assert sum(counts.values()) == expected
    assert max(bar.end for bar in drawn) == pytest.approx(last + 1.0, rel=0.01)
