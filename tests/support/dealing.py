"""Tables of cases in which every value of an axis is as frequent as the others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A value of every axis, by its name; the number is a seed for what is drawn."""

    number: int
    values: tuple[tuple[str, Any], ...]

    def __getitem__(self, axis: str) -> Any:
        return dict(self.values)[axis]

    def __str__(self) -> str:
        return f"{self.number}: " + ", ".join(f"{k}={v!r}" for k, v in self.values)


def deal(name: str, axes: dict[str, tuple[Any, ...]], count: int) -> list[Case]:
    """`count` cases, each axis dealt independently, by the table's name. The first ones
    are as good a draw as any."""
    columns = {}
    for axis, values in axes.items():
        column = [values[i % len(values)] for i in range(count)]
        random.Random(f"{name}: {axis}").shuffle(column)
        columns[axis] = column
    return [
        Case(i, tuple((axis, column[i]) for axis, column in columns.items()))
        for i in range(count)
    ]
