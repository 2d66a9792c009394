"""Small plots as inline SVG: no script, no font, no network."""

from __future__ import annotations

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
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#475569", "#a16207")
LANE: Final = 16


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


def plot(title: str, x: str, y: str, series: Sequence[Series], *, joined: bool = True, dots: bool = True) -> str:
    """Points of each series, joined by lines; both axes start at zero. The legend stands below."""
    legend = "".join(
        f'<text x="{LEFT}" y="{HEIGHT + 14 * (number + 1)}" fill="{_colour(number)}">{escape(one.name)}</text>'
        for number, one in enumerate(series)
    )
    high_x = max([1e-9, *(px for one in series for px, _ in one.points)])
    high_y = max([1e-9, *(py for one in series for _, py in one.points)])
    body = [_axes(title, x, y, f"{high_x:.4g}", f"{high_y:.4g}", HEIGHT), legend]
    for number, one in enumerate(series):
        spots = [_place(px / high_x, py / high_y) for px, py in one.points]
        if joined and len(spots) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
            body.append(f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
        for (px, py), (vx, vy) in zip(spots, one.points, strict=True) if dots else ():
            tip = f"<title>{escape(f'{one.name}: {vx:.4g}, {vy:.4g}')}</title>"
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{_colour(number)}">{tip}</circle>')
    return _svg(body, HEIGHT + 14 * len(series) + 6)


def lanes(title: str, x: str, names: Sequence[str], spans: Sequence[Span], colours: Mapping[str, str]) -> str:
    """A lane per name, with bars on a common axis from zero."""
    bottom = TOP + LANE * len(names)
    high = max([1e-9, *(span.end for span in spans)])
    body = [_axes(title, x, "", f"{high:.4g}", "", bottom + BOTTOM)]
    for number, name in enumerate(names):
        body.append(f'<text x="{LEFT - 6}" y="{TOP + LANE * number + 12}" text-anchor="end">{escape(name)}</text>')
    scale = (WIDTH - LEFT - RIGHT) / high
    for span in spans:
        top = TOP + LANE * span.lane + (LANE - 5 if span.thin else 1)
        place = f'x="{LEFT + span.start * scale:.2f}" y="{top}" width="{max(0.3, (span.end - span.start) * scale):.2f}"'
        body.append(f'<rect {place} height="{4 if span.thin else LANE - 6}" fill="{colours.get(span.kind, "#888")}"/>')
    at = LEFT
    for kind, colour in colours.items():
        body.append(f'<rect x="{at}" y="{bottom + 22}" width="10" height="10" fill="{colour}"/>')
        body.append(f'<text x="{at + 14}" y="{bottom + 31}">{escape(kind)}</text>')
        at += 32 + 7 * len(kind)
    return _svg(body, bottom + BOTTOM + 6)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _place(x: float, y: float) -> tuple[float, float]:
    return LEFT + x * (WIDTH - LEFT - RIGHT), (HEIGHT - BOTTOM) - y * (HEIGHT - BOTTOM - TOP)


def _axes(title: str, x: str, y: str, high_x: str, high_y: str, height: int) -> str:
    base, middle = height - BOTTOM, height / 2
    return (
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#888"/>'
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{base}" stroke="#888"/>'
        f'<text x="{WIDTH - RIGHT}" y="{base + 26}" text-anchor="end">{escape(x)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{base + 13}" text-anchor="end">{high_x}</text><text x="{LEFT}" y="{base + 13}">0</text>'
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">{escape(y)}</text>'
        f'<text x="{LEFT - 6}" y="{TOP + 6}" text-anchor="end">{high_y}</text>'
    )


def _svg(body: Sequence[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">{"".join(body)}</svg>'
    )
