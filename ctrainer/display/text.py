"""What a run shows as text: the live line, a line per log, the table at the end.

Pure functions of a `Progress`, so that tests can state their output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TIMINGS = ("_runtime", "_per_second", "_time")  # ends of names of metrics
SPARKS = "▁▂▃▄▅▆▇█"
BAR_MIN, BAR_MAX, SPARK_WIDTH = 4, 24, 8
_CYAN, _PLAIN = "\x1b[36m", "\x1b[0m"


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is and its last numbers; None where not known."""

    step: int = 0
    total: int = 0  # updates; 0: not known
    epoch: float | None = None
    epochs: float | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) logged
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None  # as logged last
    memory_bytes: int | None = None
    eta_seconds: float | None = None
    elapsed_seconds: float = 0.0
    evaluating: tuple[int, int | None] | None = None  # batches done, of how many
    resumed: str = ""  # from where


def number(value: float) -> str:
    """Four digits or so: 1.412, 0.00012, 1.2e+05."""
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:.3g}"


def rate(value: float, unit: str) -> str:
    """Per second, with k and M: 8.12 samples/s, 12.4k samples/s; below 1 its inverse:
    4.00 s/sample."""
    if 0 < value < 1:
        return f"{_digits(1 / value)} s/{unit.removesuffix('s')}"
    return f"{_digits(value)} {unit}/s"


def _digits(value: float) -> str:
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.1f}{letter}"
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def memory(n_bytes: int) -> str:
    """In G or M: 1.9G, 312M."""
    return f"{n_bytes / 2**30:.1f}G" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f}M"


def clock(seconds: float) -> str:
    """mm:ss, or h:mm:ss from an hour on."""
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    return (
        f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"
    )


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The course of `values` as blocks; each stands for the mean of its part."""
    finite = [v for v in values if math.isfinite(v)]
    n = min(width, len(finite))
    if n < 2:
        return ""
    cuts = [i * len(finite) // n for i in range(n + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((m - low) / span * (len(SPARKS) - 1))] for m in means)


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """`width` columns, of which `share` (0 to 1) are filled."""
    full, half, empty = ("=", ">", "-") if ascii_only else ("━", "╸", "─")
    filled = min(max(share, 0.0), 1.0) * width
    whole = int(filled)
    tip = half if filled - whole >= 0.5 else ""
    return (full * whole + tip).ljust(width, empty)


TITLE = "ctrainer"

# Parts of the live line: the lower, the longer they stay when the terminal is narrow.
# The bar takes the room that is left.
_RANKS = {
    "count": 0,
    "percent": 1,
    "loss": 2,
    "eta": 3,
    "lr": 4,
    "norm": 5,
    "samples": 6,
    "memory": 7,
    "tokens": 8,
    "mfu": 9,
    "sparks": 10,
    "epoch": 11,
    "title": 12,
}


_LEFT_OF_BAR = ("title", "count", "percent")


def _parts(p: Progress, ascii_only: bool) -> dict[str, str]:
    """Texts from left to right, by their name in _RANKS."""
    parts = {"title": TITLE}
    if p.step or p.total:
        parts["count"] = f"{p.step}/{p.total}" if p.total else f"{p.step}"
    if p.evaluating is not None:
        done, of = p.evaluating
        return parts | {"percent": f"eval {done}/{of}" if of else f"eval {done}"}
    if p.total:
        parts["percent"] = f"{p.step / p.total:4.0%}"
    if p.epoch is not None:
        parts["epoch"] = f"ep {p.epoch:.2f}" + (f"/{p.epochs:g}" if p.epochs else "")
    if p.losses:
        parts["loss"] = f"loss {number(p.losses[-1][1])}"
        spark = "" if ascii_only else sparkline([loss for _, loss in p.losses])
        parts |= {"sparks": spark} if spark else {}
    return parts | measures(p)


def measures(p: Progress) -> dict[str, str]:
    """Texts of the measured numbers that are known."""
    known: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "lr": (p.learning_rate, lambda v: f"lr {v:.1e}"),
        "norm": (p.grad_norm, lambda v: f"gn {number(v)}"),
        "samples": (p.samples_per_second, lambda v: rate(v, "samples")),
        "tokens": (p.tokens_per_second, lambda v: rate(v, "tok")),
        "mfu": (p.mfu, lambda v: f"mfu {v:.1%}"),
        "memory": (p.memory_bytes, memory),
        "eta": (p.eta_seconds, lambda v: f"eta {clock(v)}"),
    }
    return {name: word(v) for name, (v, word) in known.items() if v is not None}


def _share(p: Progress) -> float | None:
    done, of = p.evaluating if p.evaluating is not None else (p.step, p.total)
    return done / of if of else None


def render(
    p: Progress, width: int, *, color: bool = False, ascii_only: bool = False
) -> str:
    """The live line, at most `width` columns wide. What matters least goes first when
    the terminal is narrow; what is left over becomes the bar."""
    parts = _parts(p, ascii_only)
    while len(parts) > 1 and len(" ".join(parts.values())) > width:
        del parts[max(parts, key=_RANKS.__getitem__)]
    room = min(width - len(" ".join(parts.values())) - 1, BAR_MAX)
    share = _share(p)
    if share is None or room < BAR_MIN:
        return " ".join(parts.values())[: max(width, 0)]
    drawn = bar(share, room, ascii_only=ascii_only)
    left = [text for name, text in parts.items() if name in _LEFT_OF_BAR]
    right = [text for name, text in parts.items() if name not in _LEFT_OF_BAR]
    return " ".join([*left, f"{_CYAN}{drawn}{_PLAIN}" if color else drawn, *right])


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> str:
    """eval 120  loss 1.683  accuracy 0.661  (3.1 s)"""
    shown = {k: v for k, v in metrics.items() if not k.endswith(TIMINGS)}
    prefix = _common_prefix(metrics)
    parts = [f"{prefix or 'eval'} {step}"]
    for name, value in shown.items():
        if name != "epoch" and isinstance(value, int | float):
            parts.append(f"{name.removeprefix(f'{prefix}_')} {number(value)}")
    seconds = metrics.get(f"{prefix}_runtime")
    if seconds is not None:
        parts.append(f"({seconds:.1f} s)")
    return "  ".join(parts)


def _common_prefix(metrics: Mapping[str, Any]) -> str:
    """'eval' of eval_loss, eval_runtime, ...; '' where they differ."""
    found = {name.split("_")[0] for name in metrics if name != "epoch"}
    return found.pop() if len(found) == 1 else ""


def log_line(logs: Mapping[str, Any], step: int, time: str) -> str:
    """One complete line: the time, then key=value."""
    parts = [time, f"step={step}"]
    parts += [
        f"{name}={_word(value)}" for name, value in logs.items() if name != "step"
    ]
    return " ".join(parts)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if any(c.isspace() or c in '="' for c in text) else text


# fairseq's names of the same numbers: its log readers find them in our lines.
_FAIRSEQ = {"learning_rate": "lr", "grad_norm": "gnorm"}


def log_json(logs: Mapping[str, Any], step: int, time: str, wall_seconds: float) -> str:
    """One JSON object: what was logged, and fairseq's names for it."""
    line = {"time": time, "step": step, "num_updates": step, **logs}
    line |= {ours: logs[name] for name, ours in _FAIRSEQ.items() if name in logs}
    line["wall"] = round(wall_seconds, 3)
    return json.dumps(line, default=str)


def table(rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """Lines of a right-aligned table; a column is as wide as its widest cell."""
    grid = [list(columns), *[[row.get(c, "") for c in columns] for row in rows]]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    return [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in grid
    ]


def evaluation_rows(history: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Evaluations of a log history: step, the loss last logged, and their metrics."""
    rows: list[dict[str, str]] = []
    loss: float | None = None
    for entry in history:
        loss = entry.get("loss", loss)
        metrics = {k: v for k, v in entry.items() if k.startswith("eval_")}
        if not metrics:
            continue
        row = {
            "step": str(entry.get("step", "")),
            "epoch": f"{entry.get('epoch', 0):.2f}",
        }
        if loss is not None:
            row["train loss"] = number(loss)
        rows.append(row | _metric_cells(metrics))
    return rows


def _metric_cells(metrics: Mapping[str, Any]) -> dict[str, str]:
    numbers = {
        name.removeprefix("eval_"): number(v)
        for name, v in metrics.items()
        if isinstance(v, int | float) and not name.endswith(TIMINGS)
    }
    # First, as evaluate() has it; trainer_state.json has the names by the alphabet.
    loss = {"eval loss": numbers.pop("loss")} if "loss" in numbers else {}
    return loss | numbers


def columns_of(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Names of all columns in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


LAST_ROWS = 12


def summary(
    history: Sequence[Mapping[str, Any]], step: int, first: int = 0
) -> list[str]:
    """Lines that end a run of the updates after step `first`: what it took and its
    evaluations, the last dozen."""
    last: dict[str, Any] = {}
    for entry in history:
        last.update(entry)
    parts = [f"ctrainer: {step - first} updates"]
    if ends_run(last):
        parts[0] += f" in {clock(last['train_runtime'])}"
    if first:
        parts[0] += f" from step {first} to {step}"
    for name, unit in (("samples", "samples"), ("steps", "updates")):
        value = last.get(f"train_{name}_per_second")
        if value is not None:
            parts.append(rate(value, unit))
    if "train_loss" in last:
        parts.append(f"train loss {number(last['train_loss'])}")
    nonfinite = _nonfinite_steps(history)
    if nonfinite:
        parts.append(f"{nonfinite} of them with gradients NaN or Inf")
    rows = evaluation_rows(history)
    return [
        ", ".join(parts),
        *(table(rows[-LAST_ROWS:], columns_of(rows)) if rows else []),
    ]


def ends_run(logs: Mapping[str, Any]) -> bool:
    """Are these the metrics of a whole run? Each log has a train_runtime where tokens
    are counted."""
    return "train_loss" in logs and "train_runtime" in logs


def _nonfinite_steps(history: Iterable[Mapping[str, Any]]) -> int:
    """As the metrics of the run say; before these, the sum of the logs."""
    total = 0
    for entry in history:
        count = int(entry.get("nonfinite_steps", 0))
        total = (count or total) if ends_run(entry) else total + count
    return total
