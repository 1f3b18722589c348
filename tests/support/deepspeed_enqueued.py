"""Runs of DeepSpeed's engine, ours, on a GPU, whose updates the host enqueues, or
measures first."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import any_gpu
import deepspeed_engines as engines
import torch

from ctrainer import _C, optim
from ctrainer.compat import deepspeed
from ctrainer.schedules import get_scheduler

UPDATES = 8
LOOKS: dict[str, Callable[[Any], Any]] = {
    "applied": lambda engine: engine.was_step_applied(),
    "norm": lambda engine: engine.get_global_grad_norm(),
    "skipped": lambda engine: engine.skipped_steps,
    "overflow": lambda engine: bool(engine.optimizer.overflow),
    "not": lambda engine: engine.optimizer.overflow == False,  # noqa: E712
    "repr": lambda engine: repr(engine.optimizer.overflow),
    "hash": lambda engine: hash(engine.optimizer.overflow),
    "pickle": lambda engine: pickle.loads(pickle.dumps(engine.optimizer.overflow)),
    "copy": lambda engine: copy.deepcopy(engine.optimizer.overflow),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "torch": lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 5),
    "chained": lambda of: torch.optim.lr_scheduler.SequentialLR(
        of,
        [
            torch.optim.lr_scheduler.ConstantLR(of, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(of, 0.9),
        ],
        [3],
    ),
    "ours": lambda of: get_scheduler(
        "linear", of, num_warmup_steps=2, num_training_steps=UPDATES
    ),
    "of a class of nobody's": lambda of: Nobodys(of, lambda done: 0.9**done),
}


class Nobodys(torch.optim.lr_scheduler.LambdaLR):
    """Might keep anything."""


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """No update is enqueued."""
    of_engine = _C.update_parameters

    def measures(*args: Any, **keywords: Any) -> Any:
        return of_engine(*args, **keywords | {"enqueue": False, "group": None})

    with mock.patch.object(_C, "update_parameters", measures):
        yield


def section(name: str) -> dict[str, Any]:
    params: dict[str, Any] = {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    if name == "WarmupDecayLR":
        params["total_num_steps"] = UPDATES
    if name == "OneCycle":
        params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}
        params["cycle_first_step_size"] = 3
    return {"type": name, "params": params}


def made(
    stage: int, dtype: str, schedule: str, clip: float, passes: int, optimizer: str,
    **more: Any,
) -> Any:  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": passes, "gradient_clipping": clip, **more,
    }  # fmt: skip
    if dtype == "fp16":
        scales = {"initial_scale_power": 13, "loss_scale_window": 2}
        config["fp16"] = {"enabled": True, **scales, **config.get("fp16", {})}
    elif dtype == "bf16":
        config["bf16"] = {"enabled": True}
    given: dict[str, Any] = {}
    if schedule in SCHEDULES:
        given["lr_scheduler"] = SCHEDULES[schedule]
    elif schedule:
        config["scheduler"] = section(schedule)
    cls = getattr(optim, optimizer, None) or getattr(torch.optim, optimizer[6:])
    gc.collect()  # groups of earlier engines wait for the device when they are left
    return deepspeed.initialize(
        model=engines.Model(), config=config,
        optimizer=lambda params: cls(params, lr=1e-2), **given,
    )[0]  # fmt: skip


def run(
    enqueues: bool,
    looks: dict[int, str],
    bad: set[int],
    rank: int = 0,
    world: int = 1,
    **options: Any,
) -> tuple[list[Any], list[int]]:
    """What is seen of a run, and how often the host waits in each step(). looks: at
    which passes somebody asks, and for what; bad: passes with a loss of NaN."""
    with contextlib.nullcontext() if enqueues else measured():
        torch.manual_seed(0)
        engine = made(**options)
        seen: list[Any] = []
        waits, losses = [], []
        draws = torch.Generator().manual_seed(5)
        kind = engines.DTYPES[options["dtype"]]
        for at in range(UPDATES * engine.gradient_accumulation_steps()):
            of_all = [
                [torch.randn(2, n, generator=draws).to(kind) for n in (5, 3)]
                for _ in range(world)
            ]
            x, y = engines.placed(engine, of_all[rank])
            loss = engine(x, y * math.nan if at in bad else y)
            losses.append(engine.backward(loss).detach())
            before = any_gpu.waits()
            engine.step()
            waits.append(any_gpu.waits() - before)
            if at in looks:
                seen.append((LOOKS[looks[at]](engine), engine.get_lr()))
        seen += [look(engine) for look in LOOKS.values()]
        seen += [engine.get_lr(), engine.global_steps, engine.optimizer.cur_scale]
        seen += [loss.item() for loss in losses]
        if engine.lr_scheduler is not None:
            seen.append(engine.lr_scheduler.get_last_lr())
        seen += [p.detach().cpu().tolist() for p in engine.parameters()]
        state = engine.optimizer.state_dict()["state"]
        seen += [
            value.cpu().tolist() if isinstance(value, torch.Tensor) else value
            for _, of_param in sorted(state.items())
            for _, value in sorted(of_param.items())
        ]
        return seen, waits
