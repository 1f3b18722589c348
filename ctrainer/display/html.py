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

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 150, 44, 8, 8, 18
MAX_POINTS = 400
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


def _axes(frame: _Frame) -> list[str]:
    base = HEIGHT - BOTTOM
    line = "stroke='currentColor' opacity='.35'"
    text = "fill='currentColor'"
    return [
        f"<line x1='{LEFT}' y1='{base}' x2='{WIDTH - RIGHT}' y2='{base}' {line}/>",
        f"<line x1='{LEFT}' y1='{TOP}' x2='{LEFT}' y2='{base}' {line}/>",
        f"<text x='{LEFT - 4}' y='{TOP + 8}' text-anchor='end' {text}>"
        f"{number(frame.high)}</text>",
        f"<text x='{LEFT - 4}' y='{base}' text-anchor='end' {text}>"
        f"{number(frame.low)}</text>",
        f"<text x='{LEFT}' y='{HEIGHT - 4}' {text}>{frame.left:g}</text>",
        f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 4}' text-anchor='end' {text}>"
        f"step {frame.right:g}</text>",
    ]


def _curve(frame: _Frame, name: str, points: Points, place: int) -> list[str]:
    at = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thin(points)]
    color = COLORS[name]
    drawn = []
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
    label = f"<text x='{WIDTH - RIGHT}' y='{TOP + 10 + 13 * place}' text-anchor='end' "
    return [*drawn, label + f"fill='{color}'>{name} loss</text>"]


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


def _numbers(p: Progress) -> str:
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
    parts += [text for name, text in measures(p).items() if name != "eta"]
    return escape(" · ".join(parts))


def _table(history: Sequence[Mapping[str, Any]]) -> str:
    rows = evaluation_rows(history)
    if not rows:
        return ""
    columns = columns_of(rows)
    head = "".join(f"<th {_CELL}>{escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td {_CELL}>{escape(row.get(c, ''))}</td>" for c in columns)
        + "</tr>"
        for row in rows[-8:]
    )
    style = f"border-collapse:collapse;{_MONO}"
    return f"<table style='{style}'><tr>{head}</tr>{body}</table>"


def page(
    p: Progress, history: Sequence[Mapping[str, Any]], warnings: Sequence[str] = ()
) -> str:
    """The whole frame: progress and numbers, curves, evaluations, warnings."""
    done, of = p.evaluating if p.evaluating is not None else (p.step, p.total)
    size = "style='width:240px;height:14px;vertical-align:middle'"
    drawn = f"<progress value='{done}' max='{of}' {size}></progress>" if of else ""
    notes = "".join(
        f"<div style='{_MONO};color:#a15c00'>⚠ {escape(note)}</div>"
        for note in warnings
    )
    return (
        f"<div>{drawn} <span style='{_MONO}'>{_numbers(p)}</span></div>"
        "<div style='display:flex;flex-wrap:wrap;gap:16px;align-items:center'>"
        f"{svg(curves(history))}{_table(history)}</div>{notes}"
    )
