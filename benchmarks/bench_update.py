"""Clip, AdamW and zeroed gradients: ours against torch's, DeepSpeed's where it is
installed (it compiles its CPUAdam at first), and the memory.

All take turns in one process, on tensors of the same shapes; times are medians, of CPU
time where one thread works, so that other processes disturb less. The comparison with
the speed of memory is benchmarks/kernels.c. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.adamw import adamw

from ctrainer import _C, optim

Shapes = list[tuple[int, ...]]
Step = Callable[[], Any]

# The 103 parameters of sentence-transformers/all-MiniLM-L6-v2.
MINILM_LAYER: Shapes = [*[(384, 384), (384,)] * 4, *[(384,)] * 4]
MINILM_LAYER += [(1536, 384), (1536,), (384, 1536), (384,)]
MINILM: Shapes = [(30522, 384), (512, 384), (2, 384), (384,), (384,)]
MINILM += [*MINILM_LAYER * 6, (384, 384), (384,)]
# Shapes, updates in a turn, and the goal for torch's fused AdamW over ours.
CASES: dict[str, tuple[Shapes, int, float]] = {
    "one tensor of 25M": ([(25_000_000,)], 1, 1.5),
    "MiniLM, 103 tensors": (MINILM, 1, 1.5),
    "1000 tensors of 1000": ([(1000,)] * 1000, 10, 10.0),
}
MAX_NORM = 1.0


def parameters(shapes: Shapes) -> list[Parameter]:
    """Parameters with gradients that clipping has something to do with."""
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(s, generator=generator)) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def ours(params: list[Parameter]) -> Step:
    opt = optim.AdamW(params, lr=1e-4)
    return lambda: opt.step(max_norm=MAX_NORM, zero_grads=True)


def clipped(params: list[Parameter], opt: torch.optim.Optimizer) -> Step:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        opt.step()
        opt.zero_grad(set_to_none=False)

    return step


def of_torch(params: list[Parameter], **options: Any) -> Step:
    return clipped(params, torch.optim.AdamW(params, lr=1e-4, **options))


def of_deepspeed(params: list[Parameter]) -> Step:
    with contextlib.redirect_stdout(sys.stderr):  # its log
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        opt = DeepSpeedCPUAdam(params, lr=1e-4, weight_decay=0.01)
    return clipped(params, opt)


def tuned(params: list[Parameter]) -> Step:
    """torch's kernels without its conveniences: the norms in one call, clipping as the
    fused kernel's grad_scale, state kept here."""
    grads = [p.grad for p in params if p.grad is not None]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    counts = [torch.zeros((), device=p.device) for p in params]

    def step() -> None:
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            scale = torch.clamp((norm + 1e-6) / MAX_NORM, min=1.0)
            adamw(
                params, grads, *moments, [], counts, fused=True, grad_scale=scale,
                amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-4, weight_decay=0.01,
                eps=1e-8, maximize=False,
            )  # fmt: skip
            torch._foreach_zero_(grads)

    return step


CONTESTANTS: dict[str, Callable[[list[Parameter]], Step]] = {
    "ctrainer": ours,
    "torch fused": lambda params: of_torch(params, fused=True),
    "torch foreach": lambda params: of_torch(params, foreach=True),
    "torch tuned": tuned,
}
if importlib.util.find_spec("deepspeed") is not None:
    CONTESTANTS["DeepSpeed CPUAdam"] = of_deepspeed


def seconds(step: Step, clock: Callable[[], float], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        step()
    return (clock() - start) / repeats


def measure(
    shapes: Shapes, repeats: int, threads: int, rounds: int
) -> dict[str, list[float]]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    steps = {name: make(parameters(shapes)) for name, make in CONTESTANTS.items()}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, clock, repeats))
    return times


def report(case: str, threads: int, goal: float, times: dict[str, list[float]]) -> None:
    """One line for each peer: the ratio of the medians is peer over ctrainer."""
    median = {name: statistics.median(values) for name, values in times.items()}
    size = "1 thread" if threads == 1 else f"{threads} threads"
    for peer in list(median)[1:]:
        fields = {
            "benchmark": "update",
            "name": f"clip + AdamW + zero, {case}, {size}",
            "peer": peer,
            "ours": median["ctrainer"] * 1e3,
            "theirs": median[peer] * 1e3,
            "unit": "ms",
            "ratio": median[peer] / median["ctrainer"],
        }
        if threads == 1 and peer == "torch fused":
            fields["goal"] = goal
        print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--case", choices=list(CASES), nargs="+")
    options = parser.parse_args()
    os.environ["DEEPSPEED_LOG_LEVEL"] = "warning"  # no lines among those of JSON
    for threads in options.threads:
        torch.set_num_threads(threads)
        _C.set_num_threads(threads)
        for case in options.case or CASES:
            shapes, repeats, goal = CASES[case]
            times = measure(shapes, repeats, threads, options.rounds)
            report(case, threads, goal, times)
    if options.case:
        return
    subprocess.run(["make", "-s", "build/bench_kernels"], check=True)
    environment = {**os.environ, "CTRAINER_NUM_THREADS": "1"}
    subprocess.run(["build/bench_kernels", "--json"], check=True, env=environment)


if __name__ == "__main__":
    main()
