"""clip + AdamW + zero against torch's fused AdamW, and against the memory's speed.

One thread, CPU time of the process, in alternation. Prints JSON lines.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable

os.environ["CTRAINER_NUM_THREADS"] = "1"

import torch

from ctrainer.optim import AdamW

# Gradients stay zero after the first update, so the moments shrink by beta1 a step;
# some hundred steps later they would be subnormal, and slow for everyone.
ROUNDS = 15
WARM_UP = 2

HIDDEN, INNER, LAYERS = 384, 1536, 6
Shapes = list[tuple[int, ...]]


def minilm() -> Shapes:
    """The 103 parameters of sentence-transformers/all-MiniLM-L6-v2."""
    norm: Shapes = [(HIDDEN,), (HIDDEN,)]
    dense: Shapes = [(HIDDEN, HIDDEN), (HIDDEN,)]
    layer = [*dense * 4, *norm, (INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,)]
    embeddings: Shapes = [(30522, HIDDEN), (512, HIDDEN), (2, HIDDEN)]
    return [*embeddings, *norm, *(layer + norm) * LAYERS, *dense]


def parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def ours(shapes: Shapes) -> Callable[[], object]:
    optimizer = AdamW(parameters(shapes))
    return lambda: optimizer.step(max_norm=1.0, zero_grads=True)


def fused(shapes: Shapes) -> Callable[[], object]:
    clipped = parameters(shapes)
    optimizer = torch.optim.AdamW(clipped, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return update


def milliseconds(update: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        update()
    return (time.process_time() - start) / repeats * 1e3


def compare(name: str, shapes: Shapes, repeats: int, goal: float) -> None:
    updates = ours(shapes), fused(shapes)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + ROUNDS):
        for update, taken in zip(updates, times, strict=True):
            taken.append(milliseconds(update, repeats))
    mine, theirs = (statistics.median(taken[WARM_UP:]) for taken in times)
    fields = {
        "benchmark": "update",
        "name": f"clip + AdamW + zero, {name}",
        "unit": "ms",
        "peer": "torch fused",
        "ours": mine,
        "theirs": theirs,
        "ratio": theirs / mine,
        "goal": goal,
    }
    print(json.dumps(fields), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    compare("one tensor of 25M", [(25_000_000,)], 1, 1.5)
    compare("MiniLM, 103 tensors", minilm(), 1, 1.5)
    compare("1000 tensors of 1000", [(1000,)] * 1000, 10, 10.0)
    subprocess.run(["make", "-s", "build/bench_kernels"], check=True)
    subprocess.run(["build/bench_kernels", "--json"], check=True)


if __name__ == "__main__":
    main()
