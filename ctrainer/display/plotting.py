"""A picture of a run from its log history. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ctrainer.display.html import COLORS, curves
from ctrainer.display.text import TIMINGS

Points = list[tuple[float, float]]


def metric_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Evaluation metrics other than the loss and timings, by step."""
    found: dict[str, Points] = {}
    for entry in history:
        for name, value in entry.items():
            if not name.startswith("eval_") or name.endswith(("_loss", *TIMINGS)):
                continue
            if isinstance(value, int | float):
                point = (float(entry.get("step", 0)), float(value))
                found.setdefault(name.removeprefix("eval_"), []).append(point)
    return found


def plot(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draw the losses, and beside them the metrics, of `trainer.state.log_history`.

    Args:
        log_history (Sequence[Mapping[str, Any]]): Logs with "step" and numbers by name.
        path (str | os.PathLike[str]): The picture; its suffix says the kind: png, svg,
            pdf.
        title (str, default ''): Above the picture.

    Raises:
        ValueError: nothing was logged.
        ImportError: matplotlib is not installed.

    Example:
        >>> from ctrainer import plot
        >>> plot([{"loss": 2.0, "step": 1}, {"loss": 1.0, "step": 2}], "loss.svg")
    """
    losses, metrics = curves(log_history), metric_curves(log_history)
    panels = [p for p in (("loss", losses), ("evaluation", metrics)) if p[1]]
    if not panels:
        raise ValueError("log_history has neither a loss nor a metric to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plot needs matplotlib: pip install "ctrainer[plot]"'
        ) from error
    figure = Figure(figsize=(5.2 * len(panels), 3.4), layout="constrained")
    for place, (name, group) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        _draw(axes, name, group)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, name: str, group: Mapping[str, Points]) -> None:
    for label, points in group.items():
        steps = [x for x, _ in points]
        values = [y for _, y in points]
        marker = "" if label == "train" and len(points) > 1 else "o"
        color = COLORS.get(label) if name == "loss" else None
        axes.plot(steps, values, label=label, color=color, marker=marker, markersize=4)
    axes.set_xlabel("update")
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
