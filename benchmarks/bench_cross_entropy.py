"""linear_cross_entropy against torch's cross entropies of a linear layer: CPU time
and memory of forward and backward on one thread.

The peers are F.cross_entropy of F.linear, which holds all logits, and
F.linear_cross_entropy, where this torch has it. All take turns in one process for the
time; for the memory each runs in a process of its own. Prints JSON lines.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ctrainer import linear_cross_entropy

SHAPES = {  # rows, width, classes
    "2,048 rows of 128, 50,257 classes": (2048, 128, 50257),
    "512 rows of 768, 50,257 classes": (512, 768, 50257),
}


def of_linear(hidden: Any, weight: Any, labels: Any) -> Any:
    return functional.cross_entropy(functional.linear(hidden, weight), labels)


def of_torch(hidden: Any, weight: Any, labels: Any) -> Any:
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, labels, options=options)


WAYS: dict[str, Callable[..., Any]] = {
    "ctrainer": linear_cross_entropy,
    "cross_entropy of linear": of_linear,
}
if hasattr(functional, "linear_cross_entropy"):
    WAYS["F.linear_cross_entropy"] = of_torch


def operands(shape: tuple[int, int, int], rows: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    _, width, classes = shape
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(0, classes, (rows,))


def step(way: str, given: tuple[Any, ...]) -> float:
    start = time.process_time()
    loss = WAYS[way](*given)
    loss.backward()
    given[0].grad = given[1].grad = None
    return time.process_time() - start


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise KeyError("VmHWM")


def extra_mib(way: str, shape: tuple[int, int, int]) -> float:
    """Of a step beyond the operands and one row."""
    given = operands(shape, shape[0])
    step(way, operands((1, 8, 8), 1))
    before = peak_mib()
    step(way, given)
    return peak_mib() - before


def measured_memory(way: str, what: str) -> float:
    command = [sys.executable, __file__, "--memory", way, what]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def emit(what: str, unit: str, values: dict[str, float], goal: float | None) -> None:
    for peer in list(WAYS)[1:]:
        fields = {
            "benchmark": "cross_entropy", "name": what, "unit": unit, "peer": peer,
            "ours": values["ctrainer"], "theirs": values[peer],
            "ratio": values[peer] / values["ctrainer"], "goal": goal,
        }  # fmt: skip
        print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "SHAPE"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        way, what = options.memory
        print(extra_mib(way, SHAPES[what]))
        return
    for what, shape in SHAPES.items():
        given = operands(shape, shape[0])
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(options.rounds + 1):
            for way in WAYS:
                seconds = step(way, given)
                if turn:  # the first one warms up
                    times[way].append(seconds)
        medians = {way: statistics.median(found) for way, found in times.items()}
        emit(f"cross entropy, CPU time, {what}", "s", medians, 1.0)
        memory = {way: measured_memory(way, what) for way in WAYS}
        emit(f"cross entropy, memory of a step, {what}", "MiB", memory, None)


if __name__ == "__main__":
    main()
