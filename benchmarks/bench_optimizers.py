"""Every optimizer's update of MiniLM's parameters, ours against its original's.

torch's fastest implementation of each, or the package's own; where an original runs on
a GPU alone or is not installed, its formula in torch's _foreach functions, as people
write it. No clipping and no zeroing on either side. All take turns in one process;
times are medians, of CPU time where one thread works. Where several do, a pause goes
before each turn: OpenMP's threads spin for a while after a step, on cores that the next
to come would need, so that whoever follows torch would pay for it. `share` is what the
update's reads and writes come to, of what this memory does beside it
(benchmarks/kernels.c); an optimizer that computes more than it reads and writes has
none. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_update import MINILM, parameters
from torch.nn import Parameter

from ctrainer import _C, optim

Params = list[Parameter]
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """ours and theirs make a step for parameters; so many elements of dtype are read
    and written for one parameter, or None where memory is not the limit."""

    ours: Callable[[Params], Step]
    peer: str
    theirs: Callable[[Params], Step]
    elements: int | None
    dtype: torch.dtype = torch.float32


def step_of(cls: Any, **options: Any) -> Callable[[Params], Step]:
    return lambda params: cls(params, **options).step


def of_torch(name: str, **options: Any) -> Callable[[Params], Step]:
    return step_of(getattr(torch.optim, name), **options)


# torch has a fused one on CPUs alone.
ADAGRAD = "foreach" if torch.cuda.is_available() else "fused"


# Formulas whose originals are not at hand, with one kernel for each operation.


def lion(params: Params) -> Step:
    """Chen et al., 2023, algorithm 2."""
    moments = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in params]
        torch._foreach_mul_(params, 1 - 1e-4 * 0.01)
        updates = torch._foreach_lerp(moments, grads, 0.1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-1e-4)
        torch._foreach_lerp_(moments, grads, 0.01)

    return step


def lamb(params: Params) -> Step:
    """You et al., 2020, algorithm 2, in AdamW's form of weight decay."""
    m = [torch.zeros_like(p) for p in params]
    v = [torch.zeros_like(p) for p in params]
    count = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        grads = [p.grad for p in params]
        torch._foreach_lerp_(m, grads, 0.1)
        torch._foreach_mul_(v, 0.999)
        torch._foreach_addcmul_(v, grads, grads, 0.001)
        roots = torch._foreach_sqrt(v)
        torch._foreach_div_(roots, (1 - 0.999**count) ** 0.5)
        torch._foreach_add_(roots, 1e-6)
        updates = torch._foreach_div(m, roots)
        torch._foreach_div_(updates, 1 - 0.9**count)
        torch._foreach_add_(updates, params, alpha=0.01)
        ratios = torch._foreach_div(
            torch._foreach_norm(params), torch._foreach_norm(updates)
        )
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-1e-3)

    return step


def lars(params: Params) -> Step:
    """You et al., 2017, algorithm 1, with momentum 0.9."""
    buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in params]
        norms = torch._foreach_norm(params)
        below = torch._foreach_add(
            torch._foreach_norm(grads), torch._foreach_mul(norms, 0.01)
        )
        rates = torch._foreach_mul(torch._foreach_div(norms, below), 1e-3)
        decayed = torch._foreach_add(grads, params, alpha=0.01)
        torch._foreach_mul_(decayed, rates)
        torch._foreach_mul_(buffers, 0.9)
        torch._foreach_add_(buffers, decayed)
        torch._foreach_add_(params, buffers, alpha=-1e-3)

    return step


def muon(cls: Any, **options: Any) -> Callable[[Params], Step]:
    """Of the matrices of one layer: a Newton-Schulz iteration is 15 products."""

    def make(params: Params) -> Step:
        return cls([p for p in params if p.shape == (384, 384)], **options).step

    return make


def transformers_adafactor(params: Params) -> Step:
    from transformers.optimization import Adafactor

    return Adafactor(params).step


def schedule_free(name: str, **options: Any) -> Callable[[Params], Step] | None:
    if importlib.util.find_spec("schedulefree") is None:
        return None
    import schedulefree

    return training(getattr(schedulefree, name), **options)


def of_bitsandbytes(name: str) -> Callable[[Params], Step] | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    return step_of(getattr(bitsandbytes.optim, name))


def training(cls: Any, **options: Any) -> Callable[[Params], Step]:
    def make(params: Params) -> Step:
        optimizer = cls(params, **options)
        optimizer.train()
        return optimizer.step

    return make


def cases() -> dict[str, Case]:
    momentum = {"lr": 1e-3, "momentum": 0.9}
    made = {
        "AdamW": Case(
            step_of(optim.AdamW), "torch fused", of_torch("AdamW", fused=True), 7
        ),
        "AdamW, bfloat16": Case(
            step_of(optim.AdamW), "torch fused", of_torch("AdamW", fused=True), 7,
            torch.bfloat16,
        ),
        "AdamW, amsgrad": Case(
            step_of(optim.AdamW, amsgrad=True), "torch fused",
            of_torch("AdamW", amsgrad=True, fused=True), 9,
        ),
        "Adam, L2": Case(
            step_of(optim.Adam, weight_decay=0.01), "torch fused",
            of_torch("Adam", weight_decay=0.01, fused=True), 7,
        ),
        "SGD": Case(
            step_of(optim.SGD, lr=1e-3), "torch fused",
            of_torch("SGD", lr=1e-3, fused=True), 3,
        ),
        "SGD, momentum": Case(
            step_of(optim.SGD, **momentum), "torch fused",
            of_torch("SGD", **momentum, fused=True), 5,
        ),
        "Adagrad": Case(
            step_of(optim.Adagrad), f"torch {ADAGRAD}",
            of_torch("Adagrad", **{ADAGRAD: True}), 5,
        ),
        "Adadelta": Case(
            step_of(optim.Adadelta), "torch foreach",
            of_torch("Adadelta", foreach=True), 7,
        ),
        "Adamax": Case(
            step_of(optim.Adamax), "torch foreach", of_torch("Adamax", foreach=True), 7
        ),
        "RAdam": Case(
            step_of(optim.RAdam), "torch foreach", of_torch("RAdam", foreach=True), 7
        ),
        "NAdam": Case(
            step_of(optim.NAdam), "torch foreach", of_torch("NAdam", foreach=True), 7
        ),
        "RMSprop, centered, momentum": Case(
            step_of(optim.RMSprop, centered=True, momentum=0.9), "torch foreach",
            of_torch("RMSprop", centered=True, momentum=0.9, foreach=True), 9,
        ),
        "Lion": Case(step_of(optim.Lion), "foreach", lion, 5),
        "LAMB": Case(
            step_of(optim.LAMB, max_grad_norm=0.0), "foreach", lamb, 11
        ),
        "LARS": Case(
            step_of(optim.LARS, **momentum, weight_decay=0.01), "foreach", lars, 7
        ),
        "Adafactor": Case(
            step_of(optim.Adafactor), "transformers", transformers_adafactor, None
        ),
        "Muon, 25 of 384 x 384": Case(
            muon(optim.Muon), "torch", muon(torch.optim.Muon), None
        ),
    }  # fmt: skip
    coded = of_bitsandbytes("AdamW8bit")
    if coded is not None:
        made["AdamW8bit"] = Case(step_of(optim.AdamW8bit), "bitsandbytes", coded, None)
    for name, elements in (
        ("AdamWScheduleFree", 7),
        ("RAdamScheduleFree", 7),
        ("SGDScheduleFree", 5),
    ):
        theirs = schedule_free(name)
        if theirs is not None:
            made[name] = Case(
                training(getattr(optim, name)), "schedulefree foreach", theirs, elements
            )
    return made


def parameters_of(dtype: torch.dtype) -> Params:
    """MiniLM's, with gradients, in a dtype."""
    made = parameters(MINILM)
    for param in made:
        grad, param.grad = param.grad, None
        param.data = param.data.to(dtype)
        param.grad = None if grad is None else grad.to(dtype)
    return made


PAUSE_SECONDS = 0.02  # libgomp spins for some milliseconds by default


def measure(case: Case, threads: int, rounds: int) -> tuple[float, float, int]:
    """Medians of ours and of theirs in seconds, and the number of parameters."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    sets = [parameters_of(case.dtype) for _ in range(2)]
    steps = [case.ours(sets[0]), case.theirs(sets[1])]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for kept, step in zip(times, steps, strict=True):
            if threads > 1:
                time.sleep(PAUSE_SECONDS)
            start = clock()
            step()
            if turn >= 2:  # the first makes the state, the second faults it in
                kept.append(clock() - start)
    ours, theirs = map(statistics.median, times)
    return ours, theirs, sum(p.numel() for p in sets[0])


def bytes_per_second(threads: int) -> float:
    """What loops that touch memory as AdamW does reach, on tensors of this size."""
    environment = {**os.environ, "CTRAINER_NUM_THREADS": str(threads)}
    done = subprocess.run(
        ["build/bench_kernels", "--json"], check=True, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    row = next(r for r in rows if "100 tensors" in r["name"])
    return float(100 * 227_000 * 36 / (row["theirs"] * 1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", help="names of optimizers")
    options = parser.parse_args()
    subprocess.run(["make", "-s", "build/bench_kernels"], check=True)
    for threads in options.threads:
        torch.set_num_threads(threads)
        _C.set_num_threads(threads)
        memory = bytes_per_second(threads)
        for name, case in cases().items():
            if options.only and name not in options.only:
                continue
            ours, theirs, n = measure(case, threads, options.rounds)
            touched = (case.elements or 0) * case.dtype.itemsize * n
            line = {
                "benchmark": "optimizers", "name": name, "threads": threads,
                "peer": case.peer, "ours": ours * 1e3, "theirs": theirs * 1e3,
                "unit": "ms", "ratio": theirs / ours, "goal": 1.0,
                "share": touched / ours / memory if touched else None,
            }  # fmt: skip
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
