"""A bar chart as SVG, by hand: time to first token, cold against restored."""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, RIGHT, TOP = 720, 26, 220, 80, 64
COLOURS = {"cold": "#b0b7c3", "restored": "#2f7d5b"}


def bar_chart(title: str, subtitle: str, bars: list[tuple[str, str, float]]) -> str:
    """``bars`` are (label, "cold" or "restored", seconds)."""
    longest = max((seconds for _, _, seconds in bars), default=1.0)
    height = TOP + ROW * len(bars) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="16" font-weight="bold" fill="#222">{escape(title)}</text>',
        f'<text x="16" y="44" fill="#555">{escape(subtitle)}</text>',
    ]
    for index, (label, kind, seconds) in enumerate(bars):
        y = TOP + index * ROW
        length = max(2.0, (WIDTH - LEFT - RIGHT) * seconds / longest)
        lines.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#222">{escape(label)}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 8}" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 14}" fill="#222">{seconds:.2f} s</text>')
    return "\n".join([*lines, "</svg>", ""])
