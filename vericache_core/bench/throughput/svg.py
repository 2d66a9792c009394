"""Small plots as inline SVG: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 280
LEFT: Final = 64
RIGHT: Final = 20
TOP: Final = 34
BOTTOM: Final = 40
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#64748b", "#a16207")
CAP: Final = "#888888"
LANE: Final = 16
ROW: Final = 20
NAMES: Final = 220
FIGURES: Final = 150
"""Of ``bars``: their height, and the room left and right of them for names and figures."""


@dataclass(frozen=True)
class Series:
    """Points ``(x, y)`` of one name."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Span:
    """A bar in a lane; ``thin`` ones lie at its lower edge."""

    lane: int
    start: float
    end: float
    kind: str
    thin: bool = False


@dataclass(frozen=True)
class Bar:
    """A value of one name, the least and the most that it was, and what stands beside the bar."""

    name: str
    value: float
    low: float
    high: float
    label: str


def plot(
    title: str, x: str, y: str, series: Sequence[Series], *, joined: bool = True, dots: bool = True, cap: float | None = None
) -> str:
    """Points of each series, joined by lines; both axes start at zero. ``cap`` is drawn as a dashed line across."""
    high_x = max([1e-9, *(px for one in series for px, _ in one.points)])
    ticks_y = _ticks(max([1e-9, cap or 0.0, *(py for one in series for _, py in one.points)]), beyond=True)
    high_y = ticks_y[-1]
    body = [_axes(title, x, y, HEIGHT), _marks_x(high_x, HEIGHT - BOTTOM), *_marks_y(ticks_y)]
    if cap is not None:
        at = _place(0, cap / high_y)[1]
        line = f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="{CAP}" stroke-dasharray="6 4"/>'
        body.append(line)
    for number, one in enumerate(series):
        spots = [_place(px / high_x, py / high_y) for px, py in one.points]
        if joined and len(spots) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
            body.append(f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
        for (px, py), (vx, vy) in zip(spots, one.points, strict=True) if dots else ():
            tip = f"<title>{escape(f'{one.name}: {vx:.4g}, {vy:.4g}')}</title>"
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{_colour(number)}">{tip}</circle>')
    names = [(one.name, _colour(number)) for number, one in enumerate(series)]
    drawn, height = _legend([*names, *([("cap", CAP)] if cap is not None else [])], HEIGHT)
    return _svg([*body, drawn], height)


def bars(title: str, x: str, values: Sequence[Bar]) -> str:
    """A horizontal bar a value, from zero, with its spread as a line across the end and its figure beside it."""
    high = max([1e-9, *(bar.high for bar in values)])
    room = WIDTH - NAMES - FIGURES
    body = [f'<text x="0" y="18" font-weight="bold">{escape(title)}</text>']
    for number, bar in enumerate(values):
        top = TOP + ROW * number
        low, middle, upper = (NAMES + room * value / high for value in (bar.low, bar.value, bar.high))
        centre = top + ROW / 2 - 1
        body.append(f'<text x="{NAMES - 6}" y="{centre + 4:.1f}" text-anchor="end">{escape(bar.name)}</text>')
        body.append(
            f'<rect x="{NAMES}" y="{top}" width="{max(0.5, middle - NAMES):.1f}" height="{ROW - 4}" fill="{_colour(number)}"/>'
        )
        if bar.high > bar.low:
            body.append(f'<line x1="{low:.1f}" y1="{centre:.1f}" x2="{upper:.1f}" y2="{centre:.1f}" stroke="currentColor"/>')
        body.append(f'<text x="{max(middle, upper) + 5:.1f}" y="{centre + 4:.1f}">{escape(bar.label)}</text>')
    base = TOP + ROW * len(values)
    body.append(f'<line x1="{NAMES}" y1="{TOP - 4}" x2="{NAMES}" y2="{base}" stroke="#888"/>')
    body.append(f'<text x="{NAMES}" y="{base + 14}">{escape(x)}</text>')
    return _svg(body, base + 22)


def lanes(title: str, x: str, names: Sequence[str], spans: Sequence[Span], colours: Mapping[str, str]) -> str:
    """A lane per name, with bars on a common axis from zero."""
    bottom = TOP + LANE * len(names)
    high = max([1e-9, *(span.end for span in spans)])
    body = [_axes(title, x, "", bottom + BOTTOM), _marks_x(high, bottom)]
    for number, name in enumerate(names):
        body.append(f'<text x="{LEFT - 6}" y="{TOP + LANE * number + 12}" text-anchor="end">{escape(name)}</text>')
    scale = (WIDTH - LEFT - RIGHT) / high
    for span in spans:
        top = TOP + LANE * span.lane + (LANE - 5 if span.thin else 1)
        place = f'x="{LEFT + span.start * scale:.2f}" y="{top}" width="{max(0.3, (span.end - span.start) * scale):.2f}"'
        body.append(f'<rect {place} height="{4 if span.thin else LANE - 6}" fill="{colours.get(span.kind, "#888")}"/>')
    used = {span.kind for span in spans}
    drawn, height = _legend([(kind, colour) for kind, colour in colours.items() if kind in used], bottom + BOTTOM)
    return _svg([*body, drawn], height)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _place(x: float, y: float) -> tuple[float, float]:
    return LEFT + x * (WIDTH - LEFT - RIGHT), (HEIGHT - BOTTOM) - y * (HEIGHT - BOTTOM - TOP)


def _axes(title: str, x: str, y: str, height: int) -> str:
    base, middle = height - BOTTOM, height / 2
    return (
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#888"/>'
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{base}" stroke="#888"/>'
        f'<text x="{WIDTH - RIGHT}" y="{base + 28}" text-anchor="end">{escape(x)}</text>'
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">{escape(y)}</text>'
    )


def _ticks(high: float, *, beyond: bool = False) -> list[float]:
    """Round numbers from zero up to ``high``, six at most; with ``beyond`` the last one is no lower than ``high``."""
    power = 10.0 ** math.floor(math.log10(high))
    step = next(power * factor for factor in (0.2, 0.5, 1, 2) if high / (power * factor) <= 5)
    return [step * number for number in range((math.ceil if beyond else math.floor)(high / step - 1e-9) + 1)]


def _marks_x(high: float, base: float) -> str:
    room = WIDTH - LEFT - RIGHT
    return "".join(
        f'<line x1="{LEFT + room * tick / high:.1f}" y1="{base}" x2="{LEFT + room * tick / high:.1f}" y2="{base + 4}" '
        f'stroke="#888"/><text x="{LEFT + room * tick / high:.1f}" y="{base + 15}" text-anchor="middle">{tick:.4g}</text>'
        for tick in _ticks(high)
    )


def _marks_y(ticks: Sequence[float]) -> list[str]:
    drawn = []
    for tick in ticks:
        at = _place(0, tick / ticks[-1])[1]
        drawn.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#8883"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    return drawn


def _legend(names: Sequence[tuple[str, str]], top: int) -> tuple[str, int]:
    """A square and a name for each of ``(name, colour)``, in lines; and the height that the plot has with it."""
    drawn, at, line = [], LEFT, top + 4
    for name, colour in names:
        width = 28 + 7 * len(name)
        if at > LEFT and at + width > WIDTH:
            at, line = LEFT, line + LANE
        drawn.append(f'<rect x="{at}" y="{line}" width="10" height="10" fill="{colour}"/>')
        drawn.append(f'<text x="{at + 14}" y="{line + 9}">{escape(name)}</text>')
        at += width
    return "".join(drawn), line + LANE + 4


def _svg(body: Sequence[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">{"".join(body)}</svg>'
    )
