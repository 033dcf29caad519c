"""A picture (SVG) of the step time against memory."""

from collections.abc import Sequence
from html import escape

import numpy as np

from placewise.core.quantities import format_bytes, format_seconds

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 60, 40, 50  # pixels

MOST_TICKS = 5  # above zero


def draw_memory_curve(title: str, memory_bytes: Sequence[int], step_seconds: Sequence[float]) -> str:
    """Returns the picture of step times (infinite: nothing fits) at some memories, both by rising memory."""
    fitting = [seconds for seconds in step_seconds if np.isfinite(seconds)]
    highest = 1.05 * (max(fitting, default=1.0) or 1.0)
    tick = _round_up(highest / MOST_TICKS)
    num_ticks, most = int(np.ceil(highest / tick)), max(memory_bytes, default=1) or 1
    top = tick * num_ticks

    def place(nbytes: float, seconds: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * nbytes / most
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / top, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number in range(num_ticks + 1):
        seconds = tick * number
        x, y = place(0, seconds)
        parts.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{escape(format_seconds(seconds))}</text>')
    points = [place(*point) for point in zip(memory_bytes, step_seconds, strict=True) if np.isfinite(point[1])]
    line = " ".join(f"{x},{y}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2266bb" stroke-width="2"/>')
    for nbytes, seconds in zip(memory_bytes, step_seconds, strict=True):
        x, y = place(nbytes, seconds if np.isfinite(seconds) else 0.0)
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(format_bytes(nbytes))}</text>')
        if np.isfinite(seconds):
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#2266bb"/>')
            parts.append(f'<text x="{x + 6}" y="{y - 7}">{escape(format_seconds(seconds))}</text>')  # where no line is
        else:
            parts.append(f'<text x="{x}" y="{y - 9}" text-anchor="middle" fill="#bb3322">nothing fits</text>')
    middle = (LEFT + WIDTH - RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">memory of the GPUs</text>')
    return "\n".join([*parts, "</svg>", ""])


def _round_up(seconds: float) -> float:
    """Returns the next of 1, 2, 2.5, 5 and 10, times a power of ten."""
    scale = 10.0 ** np.floor(np.log10(max(seconds, 1e-12)))
    return float(scale * next(step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * scale >= seconds * (1 - 1e-9)))
