"""Plot lines over a logarithmic x axis as one self-contained SVG file, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1060, 460
LEFT, RIGHT, TOP, BOTTOM = 76, 330, 14, 44
COLORS = (
    "#7f7f7f",
    "#b8860b",
    "#2ca02c",
    "#1f77b4",
    "#d62728",
    "#9467bd",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
)
_STYLE = """<style>svg{font:13px sans-serif;background:#fff;color:#222}
@media(prefers-color-scheme:dark){svg{background:#1b1b1b;color:#ddd}}
text{fill:currentColor}.grid{stroke:currentColor;opacity:.15}
.line{fill:none;stroke-width:2}</style>"""


@dataclass(frozen=True)
class Line:
    """`points`: (x above 0, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_plot(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return an SVG document with a line per name and a legend. Needs at least one point."""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or 0.05
    low, high = low - margin, high + margin
    span = math.log(xs[-1] / xs[0]) or 1.0

    def left(x: float) -> float:
        return LEFT + 10 + math.log(x / xs[0]) / span * (WIDTH - LEFT - RIGHT - 20)

    def top(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    body = [
        f'<text x="{left(x):.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>'
        for x in xs
    ]
    for number in range(6):
        value = low + (high - low) * number / 5
        body.append(f'<path class="grid" d="M{LEFT} {top(value):.1f}H{WIDTH - RIGHT}"/>')
        body.append(
            f'<text x="{LEFT - 8}" y="{top(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>'
        )
    body.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    body.append(
        f'<text text-anchor="middle" transform="translate(16 {HEIGHT / 2}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    for number, line in enumerate(lines):
        body += _drawn(line, number, [(left(x), top(y)) for x, y in line.points])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, _STYLE, *body, "</svg>\n"])


def _drawn(line: Line, number: int, places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the line, its points, and its entry in the legend."""
    color = COLORS[number % len(COLORS)]
    stroke = f'stroke="{color}"' + (' stroke-dasharray="6 4"' if line.dashed else "")
    commands = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
        f"<title>{escape(line.name)}: {value:.3f}</title></circle>"
        for (x, y), (_, value) in zip(places, line.points, strict=True)
    ]
    right, height = WIDTH - RIGHT + 16, TOP + 14 + 20 * number
    legend = [
        f'<path class="line" {stroke} d="M{right} {height - 4}h26"/>',
        f'<text x="{right + 34}" y="{height}">{escape(line.name)}</text>',
    ]
    return [f'<path class="line" {stroke} d="{commands}"/>', *dots, *legend]
