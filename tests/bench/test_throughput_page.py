"""The timeline of the benchmark's page, read back from its markup."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import pytest

from vericache_core.bench.throughput.measured import Measured, Trace
from vericache_core.bench.throughput.page import PHASES, html_page
from vericache_core.bench.throughput.rows import PLAIN, Record, row
from vericache_core.bench.throughput.svg import BOTTOM, HEIGHT, LANE, LEFT, RIGHT, TOP, WIDTH

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


def measured(rate: float, **more: object) -> Measured:
    return Measured(tokens=[[1]], decoded=1, decode_seconds=1.0 / rate, **more)  # type: ignore[arg-type]


def facts(prompt_tokens: list[int]) -> dict[str, object]:
    return {"prompt_tokens": prompt_tokens, "budget_share": None, "requests": 1}


def page_of_rates(rates: dict[str, dict[str, float]], prompts: dict[str, list[int]]) -> str:
    """A page of ``{workload: {system: tokens/s}}`` and ``{workload: prompt lengths}``."""
    records = [
        Record(
            system,
            workload,
            False,
            facts={"prompt_tokens": prompts[workload], "budget_share": None, "requests": 1},
            runs={0: measured(rate)},
        )
        for workload, systems in rates.items()
        for system, rate in systems.items()
    ]
    plains = {record.workload: record for record in records if record.system == PLAIN}
    return html_page({}, [row(record, plains[record.workload]) for record in records], records)


def plots(page: str, title: str) -> list[ET.Element]:
    """Plots of ``page`` with ``title`` in their headings."""
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return [ET.fromstring(text) for text in drawn if title in text]


def test_systems_stand_side_by_side_and_one_context_makes_no_line() -> None:
    page = page_of_rates({"long": {PLAIN: 20.0, "ours": 50.0}}, {"long": [100]})
    (drawn,) = plots(page, "long: throughput")
    widths = [float(rect.attrib["width"]) for rect in drawn.iter(f"{SVG}rect")]
    assert widths[1] / widths[0] == pytest.approx(2.5, rel=0.01)
    assert "50.0 (2.50x plain)" in page
    assert not plots(page, "Throughput against context")


def test_contexts_of_a_workload_are_joined_and_those_of_another_drawn_apart() -> None:
    rates = {"long@100": {PLAIN: 20.0}, "long@50": {PLAIN: 30.0}, "slow@100": {PLAIN: 5.0}, "slow@50": {PLAIN: 6.0}}
    prompts = {"long@100": [100], "long@50": [50], "slow@100": [100], "slow@50": [50]}
    drawn = plots(page_of_rates(rates, prompts), "Throughput against context")
    assert [len(list(one.iter(f"{SVG}polyline"))) for one in drawn] == [1, 1]


def test_workloads_of_one_length_are_not_joined() -> None:
    prompts = {"long": [100], "mixed": [50], "easy": [50]}
    (drawn,) = plots(page_of_rates({name: {PLAIN: 20.0} for name in prompts}, prompts), "Throughput against context")
    assert len(list(drawn.iter(f"{SVG}circle"))) == 3
    assert not list(drawn.iter(f"{SVG}polyline"))


def test_memory_is_drawn_below_the_cap() -> None:
    trace = Trace(phases=[(0.0, 1.0, 0, "decode")], memory=[(0.0, 4_000_000, 0, 0), (1.0, 8_000_000, 0, 0)])
    run = measured(1.0, trace=trace, device_budget_bytes=10_000_000)
    page = html_page({}, [], [Record(PLAIN, "slow-disk", True, runs={0: run})])
    (drawn,) = plots(page, "KV by tier")
    (cap,) = (line for line in drawn.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib)
    (line,) = drawn.iter(f"{SVG}polyline")
    heights = [HEIGHT - BOTTOM - float(point.split(",")[1]) for point in line.attrib["points"].split()]
    above = HEIGHT - BOTTOM - float(cap.attrib["y1"])
    assert heights[1] / above == pytest.approx(0.8, rel=0.01)
