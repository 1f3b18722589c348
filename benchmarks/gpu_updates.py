"""Updates on a GPU: ours against torch's fused and foreach ones and a graph of these.

Norm, clipping, AdamW and zeroed gradients for shapes of all kinds, then every optimizer
of bench_optimizers.py on MiniLM's parameters beside its peer. Contestants take turns in
one process; a time is the wall clock's over some updates, from an idle GPU to an idle
GPU, and what is printed are medians, a line of JSON each. --small: few and small
tensors, for the emulated device.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_optimizers
import torch
from bench_update import MAX_NORM, MINILM, Shapes, of_torch, ours, tuned
from gpu_device import device, wait
from torch.nn import Parameter

from ctrainer import optim

Step = Callable[[], Any]

# Shapes, updates in a turn, and the goals: fused with its clip over ours, and
# microseconds of the host for one of our updates.
CASES: dict[str, tuple[Shapes, int, float, float | None]] = {
    "256M in 256 tensors": ([(1024, 1024)] * 256, 5, 1 / 0.84, None),
    "MiniLM, 103 tensors": (MINILM, 20, 1.0, None),
    "1000 tensors of 1000": ([(1000,)] * 1000, 50, 1.0, 15.0),
}
SMALL: dict[str, tuple[Shapes, int, float, float | None]] = {
    "3 small tensors": ([(7, 5), (3,), (64,)], 1, 1.0, None)
}


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """On the device, with gradients that clipping has something to do with."""
    made = [Parameter(torch.randn(s, device=device()).to(dtype)) for s in shapes]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def graph_of(step: Step) -> Step:
    """The step, captured once and replayed; its options have to allow that."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def graphed(params: list[Parameter]) -> Step:
    return graph_of(of_torch(params, fused=True, capturable=True))


def ours_graphed(params: list[Parameter]) -> Step:
    opt = optim.AdamW(params, lr=1e-4, capturable=True)
    replay = graph_of(lambda: opt.step(max_norm=MAX_NORM, zero_grads=True))

    def step() -> None:
        opt.prepare_replay()
        replay()

    return step


CONTESTANTS: dict[str, Callable[[list[Parameter]], Step]] = {
    "ctrainer": ours,
    "a graph of ctrainer": ours_graphed,
    "torch fused": lambda params: of_torch(params, fused=True),
    "torch foreach": lambda params: of_torch(params, foreach=True),
    "torch tuned": tuned,
    "a graph of torch fused": graphed,
}


def flash(params: list[Parameter]) -> Step:
    """FlashOptim's AdamW: of 8 bits, with 24-bit master weights; its default."""
    from flashoptim import FlashAdamW

    return FlashAdamW(params, lr=1e-4).step


COMPACT = bench_optimizers.Case(
    bench_optimizers.step_of(optim.AdamWCompact, lr=1e-4), "flashoptim", flash, None,
    torch.bfloat16,
)  # fmt: skip


def seconds(step: Step, params: list[Parameter], updates: int) -> tuple[float, float]:
    """Of one update: until the GPU is idle again, and until the host has called it."""
    wait(params[0])
    start = time.perf_counter()
    for _ in range(updates):
        step()
    called = time.perf_counter()
    wait(params[0])
    return (time.perf_counter() - start) / updates, (called - start) / updates


def medians(
    makers: dict[str, Callable[[list[Parameter]], Step]],
    make_parameters: Callable[[], list[Parameter]],
    updates: int,
    rounds: int,
) -> dict[str, tuple[float, ...]]:
    """Of each contestant that can run here; the others are told as such."""
    steps, sets = {}, {}
    for name, make in makers.items():
        sets[name] = make_parameters()
        try:
            steps[name] = make(sets[name])
            steps[name]()
        except (RuntimeError, AttributeError, ImportError) as why:
            steps.pop(name, None)
            line = {"left_out": name, "why": str(why).partition("\n")[0]}
            print(json.dumps({"benchmark": "gpu_updates", **line}), flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            found = seconds(step, sets[name], updates)
            if turn > 0:
                times[name].append(found)
    columns = {name: zip(*turns, strict=True) for name, turns in times.items()}
    return {name: tuple(map(statistics.median, c)) for name, c in columns.items()}


def row(name: str, peer: str, mine: float, its: float, goal: float | None) -> None:
    line = {
        "benchmark": "gpu_updates", "name": name, "peer": peer, "unit": "us",
        "ours": mine * 1e6, "theirs": its * 1e6, "ratio": its / mine, "goal": goal,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    for case, (shapes, updates, goal, host_us) in (
        SMALL if options.small else CASES
    ).items():
        of = functools.partial(parameters, shapes)
        found = medians(CONTESTANTS, of, updates, options.rounds)
        mine, host = found.pop("ctrainer")
        for peer, (its, _) in found.items():
            name = f"clip + AdamW, {case}"
            row(name, peer, mine, its, goal if peer == "torch fused" else None)
        if host_us is not None:
            row(f"host's part of it, {case}", "goal", host, host_us * 1e-6, 1.0)
    what, shapes = "MiniLM's parameters", MINILM
    if options.small:
        what, (shapes, *_) = next(iter(SMALL.items()))
    cases = {"AdamWCompact, bfloat16": COMPACT, **bench_optimizers.cases()}
    few = ("AdamW", "AdamWCompact", "Lion", "LAMB")
    for name, each in cases.items():
        if options.small and name.partition(",")[0] not in few:
            continue
        makers = {"ctrainer": each.ours, each.peer: each.theirs}
        of = functools.partial(parameters, shapes, each.dtype)
        found = medians(makers, of, 20, options.rounds)
        if len(found) == 2:
            row(f"{name}, {what}", each.peer, found["ctrainer"][0],
                found[each.peer][0], 1.0)  # fmt: skip


if __name__ == "__main__":
    main()
