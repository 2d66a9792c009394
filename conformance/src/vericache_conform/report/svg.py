"""Small plots as inline SVG: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 560
HEIGHT: Final = 260
LEFT: Final = 56
BOTTOM: Final = 40
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")


@dataclass(frozen=True)
class Series:
    """Points ``(x, y)`` of one name; ``label`` of each shows as a tooltip."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


def scatter(title: str, x: str, y: str, series: Sequence[Series], *, joined: bool = False) -> str:
    """Points, or lines when ``joined``; both axes start at zero."""
    high_x = max([1e-9, *(px for one in series for px, _ in one.points)])
    high_y = max([1e-9, *(py for one in series for _, py in one.points)])
    body = [_axes(title, x, y, high_x, high_y)]
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        spots = [_place(px / high_x, py / high_y) for px, py in one.points]
        if joined and len(spots) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for at, (px, py) in enumerate(spots):
            label = one.labels[at] if at < len(one.labels) else f"{one.points[at][0]:g}, {one.points[at][1]:g}"
            tip = f"<title>{escape(f'{one.name}: {label}')}</title>"
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}">{tip}</circle>')
        body.append(f'<text x="{WIDTH - 8}" y="{20 + 16 * number}" text-anchor="end" fill="{colour}">{escape(one.name)}</text>')
    return _svg(body)


def bars(title: str, x: str, y: str, labels: Sequence[str], values: Sequence[float]) -> str:
    """One bar per label."""
    high = max([1e-9, *values])
    body = [_axes(title, x, y, None, high)]
    step = 1.0 / max(1, len(values))
    for number, (label, value) in enumerate(zip(labels, values, strict=True)):
        left, top = _place((number + 0.15) * step, value / high)
        width = 0.7 * step * (WIDTH - LEFT - 20)
        tip = f"<title>{escape(f'{label}: {value:g}')}</title>"
        place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        body.append(f'<rect {place} fill="{COLOURS[0]}">{tip}</rect>')
        body.append(f'<text x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{escape(label)}</text>')
    return _svg(body)


def timeline(title: str, drafted: Sequence[int], accepted: Sequence[int]) -> str:
    """One column per round: accepted drafts below, rejected ones above, and the token of the verifier on top."""
    rounds = len(drafted)
    high = max([1, *drafted]) + 1
    body = [_axes(title, "round", "tokens", None, float(high))]
    step = 1.0 / max(1, rounds)
    for number in range(rounds):
        blocks = (
            (0, accepted[number], "#059669", "accepted"),
            (accepted[number], drafted[number], "#dc2626", "rejected"),
            (drafted[number], drafted[number] + 1, "#2563eb", "verifier's own"),
        )
        for low, top, colour, name in blocks:
            if top > low:
                left, y = _place(number * step, top / high)
                _, base = _place(0, low / high)
                tip = f"<title>{escape(f'round {number + 1}: {top - low} {name}')}</title>"
                width = max(1.0, 0.85 * step * (WIDTH - LEFT - 20))
                body.append(
                    f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{base - y:.1f}" fill="{colour}">{tip}</rect>'
                )
    return _svg(body)


def _place(x: float, y: float) -> tuple[float, float]:
    return LEFT + x * (WIDTH - LEFT - 20), (HEIGHT - BOTTOM) - y * (HEIGHT - BOTTOM - 34)


def _axes(title: str, x: str, y: str, high_x: float | None, high_y: float) -> str:
    base = HEIGHT - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - 20}" y2="{base}" stroke="#888"/>',
        f'<line x1="{LEFT}" y1="34" x2="{LEFT}" y2="{base}" stroke="#888"/>',
        f'<text x="{WIDTH - 20}" y="{HEIGHT - 6}" text-anchor="end">{escape(x)}</text>',
        f'<text x="14" y="{base / 2 + 20}" transform="rotate(-90 14 {base / 2 + 20})" text-anchor="middle">{escape(y)}</text>',
        f'<text x="{LEFT - 6}" y="40" text-anchor="end">{high_y:g}</text>',
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">0</text>',
    ]
    if high_x is not None:
        parts.append(f'<text x="{WIDTH - 20}" y="{base + 14}" text-anchor="end">{high_x:g}</text>')
    return "".join(parts)


def _svg(body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">{"".join(body)}</svg>'
    )
