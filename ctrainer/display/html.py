"""What a run shows in a notebook: HTML and inline SVG, without JavaScript, so that it
outlives the kernel and shows on every viewer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ctrainer.display.text import (
    Progress,
    clock,
    columns_of,
    evaluation_rows,
    measures,
    number,
)

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 170, 48, 24, 18, 20
MAX_POINTS = 400
_MOST_TICKS = 8
COLORS = {"train": "#4c78a8", "eval": "#e45756"}
_CELL = "style='text-align:right;padding:1px 8px'"
_MONO = "font:12px monospace"


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points: of each stretch its lowest and its highest, so that no
    spike is lost."""
    if len(points) <= limit:
        return list(points)
    n = limit // 2
    kept: list[tuple[float, float]] = []
    for i in range(n):
        stretch = points[i * len(points) // n : (i + 1) * len(points) // n]
        ends = {
            min(stretch, key=lambda xy: xy[1]),
            max(stretch, key=lambda xy: xy[1]),
        }
        kept += sorted(ends)
    return kept


def curves(
    history: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[float, float]]]:
    """Finite losses of training and evaluation by step."""
    found: dict[str, list[tuple[float, float]]] = {"train": [], "eval": []}
    for entry in history:
        for name, key in (("train", "loss"), ("eval", "eval_loss")):
            value = entry.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                found[name].append((float(entry.get("step", 0)), float(value)))
    return {name: points for name, points in found.items() if points}


class _Frame:
    """Maps data to the picture."""

    def __init__(self, series: Mapping[str, Points]) -> None:
        xs = [x for points in series.values() for x, _ in points]
        ys = [y for points in series.values() for _, y in points]
        self.left, self.right = min(xs), max(xs)
        self.low, self.high = min(ys), max(ys)

    def x(self, value: float) -> float:
        span = (self.right - self.left) or 1.0
        return LEFT + (value - self.left) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return HEIGHT - BOTTOM - (value - self.low) / span * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, three to nine where they fit; whole: of
    steps, so none between two of them."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= _MOST_TICKS)
    step = max(step, 1.0) if whole else step
    places = range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)
    return [float(f"{i * step:.12g}") for i in places]


def _axes(frame: _Frame) -> list[str]:
    base, text = HEIGHT - BOTTOM, "fill='currentColor'"
    line = "stroke='currentColor' opacity"
    drawn = [
        f"<text x='0' y='{HEIGHT - 4}' {text}>step</text>"  # left of the first number
    ]
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        drawn += [
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}' "
            f"{line}='.15'/>",
            f"<text x='{LEFT - 4}' y='{y + 3:.1f}' text-anchor='end' {text}>{value:.6g}"
            "</text>",
        ]
    for value in ticks(frame.left, frame.right, whole=True):
        x = frame.x(value)
        drawn += [
            f"<line x1='{x:.1f}' y1='{base}' x2='{x:.1f}' y2='{base + 3}' "
            f"{line}='.35'/>",
            f"<text x='{x:.1f}' y='{HEIGHT - 4}' text-anchor='middle' {text}>"
            f"{value:.0f}</text>",
        ]
    return [
        *drawn,
        f"<line x1='{LEFT}' y1='{base}' x2='{WIDTH - RIGHT}' y2='{base}' "
        f"{line}='.35'/>",
        f"<line x1='{LEFT}' y1='{TOP}' x2='{LEFT}' y2='{base}' {line}='.35'/>",
    ]


def _curve(frame: _Frame, name: str, points: Points, place: int) -> list[str]:
    at = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thin(points)]
    color = COLORS[name]
    drawn = [  # the name is above the frame, where no curve is
        f"<text x='{LEFT + 70 * place}' y='10' fill='{color}'>● {name} loss</text>"
    ]
    if len(at) > 1:
        drawn.append(
            f"<polyline points='{' '.join(at)}' fill='none' stroke='{color}' "
            "stroke-width='1.6'/>"
        )
    if name == "eval" or len(at) == 1:
        circles = [xy.split(",") for xy in at]
        drawn += [
            f"<circle cx='{x}' cy='{y}' r='2.6' fill='{color}'/>" for x, y in circles
        ]
    return drawn


def svg(series: Mapping[str, Points]) -> str:
    """Curves over a common frame; '' without a point."""
    if not series:
        return ""
    frame = _Frame(series)
    body = _axes(frame)
    for place, (name, points) in enumerate(series.items()):
        body += _curve(frame, name, points, place)
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        "role='img' aria-label='loss by step' style='font:10px sans-serif'>"
        + "".join(body)
        + "</svg>"
    )


def _numbers(p: Progress) -> list[str]:
    """Two rows: how far the run is, and its measured numbers."""
    parts = [f"{p.step}/{p.total}" if p.total else f"step {p.step}"]
    if p.evaluating is not None:
        done, of = p.evaluating
        parts.append(f"evaluating {done}/{of}" if of else f"evaluating {done}")
    if p.epoch is not None:
        parts.append(f"epoch {p.epoch:.2f}" + (f"/{p.epochs:g}" if p.epochs else ""))
    remaining = f"<{clock(p.eta_seconds)}" if p.eta_seconds is not None else ""
    parts.append(f"{clock(p.elapsed_seconds)}{remaining}")
    if p.losses:
        parts.append(f"loss {number(p.losses[-1][1])}")
    measured = [text for name, text in measures(p).items() if name != "eta"]
    return [escape(" · ".join(row)) for row in (parts, measured)]


def title(column: str) -> str:
    """A column's name as transformers' notebook table has it."""
    losses = {"eval loss": "Validation Loss", "train loss": "Training Loss"}
    words = column.replace("_", " ").split()
    return losses.get(column) or " ".join(word.capitalize() for word in words)


def _table(history: Sequence[Mapping[str, Any]]) -> str:
    rows = evaluation_rows(history)
    if not rows:
        return ""
    columns = columns_of(rows)
    head = "".join(f"<th {_CELL}>{escape(title(c))}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td {_CELL}>{escape(row.get(c, ''))}</td>" for c in columns)
        + "</tr>"
        for row in rows[-8:]
    )
    style = f"border-collapse:collapse;{_MONO}"
    return f"<table style='{style}'><tr>{head}</tr>{body}</table>"


def line(text: str) -> str:
    """A line alone, as of an evaluation outside of training."""
    return f"<div style='{_MONO}'>{escape(text)}</div>"


def page(
    p: Progress, history: Sequence[Mapping[str, Any]], warnings: Sequence[str] = ()
) -> str:
    """The whole frame: progress and numbers, curves, evaluations, warnings."""
    done, of = p.evaluating if p.evaluating is not None else (p.step, p.total)
    size = "style='width:200px;height:14px;vertical-align:middle'"
    drawn = f"<progress value='{done}' max='{of}' {size}></progress>" if of else ""
    notes = "".join(
        f"<div style='{_MONO};color:#a15c00'>⚠ {escape(note)}</div>"
        for note in warnings
    )
    progress, measured = _numbers(p)
    return (
        f"<div style='{_MONO}'>{drawn} {progress}</div>"
        f"<div style='{_MONO}'>{measured}</div>"
        + (line(p.resumed) if p.resumed else "")
        + "<div style='display:flex;flex-wrap:wrap;gap:16px;align-items:center'>"
        f"{svg(curves(history))}{_table(history)}</div>{notes}"
    )
