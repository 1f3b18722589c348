"""A training step of ctrainer.fairseq.Trainer against fairseq's own Trainer, where
fairseq is installed (docs/start/from_fairseq.md), and against a loop written by hand.

All take turns in one process on one thread, over one task, criterion and model each;
times are of the CPU. The loop does what every trainer has to, the task's forward and
backward and the update by ctrainer's optimizer: a trainer's overhead is its step less
that of the loop. fairseq's logs into its own metrics and reads its config through
OmegaConf, as fairseq-train has it. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import torch
from torch import nn

from ctrainer import _C, optim
from ctrainer.fairseq import Trainer, as_config, install, metrics

ELEMS = 256  # of a tensor
UPDATES = {2: 300, 200: 40}  # a turn, by the number of tensors
OVERHEAD_ALLOWED_US = 60.0
TOTAL_ALLOWED = 1.05  # a whole update, in units of forward and backward
LONG_RUN = 20_000
GROWTH_ALLOWED_BYTES = 1.0  # an update: less than any object that is kept
PEER = "fairseq 0.12"


class Model(nn.Module):
    """As many parameters as asked for, two operations each."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(ELEMS) / 16 for _ in range(tensors))

    def set_num_updates(self, updates: int) -> None:
        """What fairseq's models have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.dot(x, part) for part in self.parts]).sum()


class Criterion(nn.Module):
    def forward(self, model: nn.Module, sample: dict[str, torch.Tensor]) -> Any:
        loss = model(sample["x"])
        names = ("ntokens", "nsentences", "sample_size")
        return loss, 4, {"loss": 1.0, **dict.fromkeys(names, 4)}


class Task:
    """What fairseq's tasks do in a step; `log` is the metrics module that they use."""

    uses_ema = False

    def __init__(self, log: ModuleType | Any) -> None:
        self.log = log

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int,
        ignore_grad: bool = False,
    ) -> Any:  # fmt: skip
        model.train()
        model.set_num_updates(update_num)
        loss, size, output = criterion(model, sample)
        if ignore_grad:
            loss *= 0
        optimizer.backward(loss)
        return loss, size, output

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        optimizer.step()

    def reduce_metrics(self, outputs: list[dict[str, Any]], criterion: Any) -> None:
        words, lines = (sum(o[k] for o in outputs) for k in ("ntokens", "nsentences"))
        self.log.log_scalar("wpb", words, priority=180, round=1)
        self.log.log_speed("wps", words, priority=90, round=1)
        self.log.log_scalar("bsz", lines, priority=190, round=1)
        loss = sum(o["loss"] for o in outputs)
        self.log.log_scalar("loss", loss / words, words, round=3)
        self.log.log_derived("ppl", lambda meters: 2 ** meters["loss"].avg)


OPTIONS: dict[str, Any] = {
    "common": {"cpu": True},
    "optimization": {"clip_norm": 1.0, "lr": [1e-4]},
    "optimizer": {"_name": "adam", "lr": [1e-4], "adam_betas": "(0.9, 0.98)"},
    "lr_scheduler": {"_name": "inverse_sqrt", "lr": [1e-4], "warmup_updates": 10},
}


class Plain:
    """What a task needs of an optimizer."""

    @staticmethod
    def backward(loss: torch.Tensor) -> None:
        loss.backward()


def loop(tensors: int) -> Callable[[Any], None]:
    """Forward, backward and the update, with nothing around them."""
    model, criterion, task = Model(tensors), Criterion(), Task(None)
    optimizer = optim.FairseqAdam(model.parameters(), lr=1e-4)

    def step(sample: Any) -> None:
        optimizer.zero_grad()
        task.train_step(sample, model, criterion, Plain, 0)
        optimizer.step(max_norm=1.0)

    return step


def forward_backward(tensors: int) -> Callable[[Any], None]:
    model, criterion, task = Model(tensors), Criterion(), Task(None)

    def step(sample: Any) -> None:
        for parameter in model.parts:
            parameter.grad = None
        task.train_step(sample, model, criterion, Plain, 0)

    return step


def ours(tensors: int) -> Callable[[Any], None]:
    cfg = as_config(OPTIONS)
    trainer = Trainer(cfg, Task(metrics), Model(tensors), Criterion())
    return lambda sample: trainer.train_step([sample])


def theirs(tensors: int) -> Callable[[Any], None]:
    with contextlib.redirect_stderr(None):  # hydra's warnings
        install(trainer=False)
        from fairseq.dataclass.configs import FairseqConfig
        from fairseq.logging import metrics as their_metrics
        from fairseq.optim.adam import FairseqAdamConfig
        from fairseq.optim.lr_scheduler import inverse_square_root_schedule as schedule
        from fairseq.trainer import Trainer as TheirTrainer
    from omegaconf import OmegaConf, open_dict

    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        cfg.optimizer = OmegaConf.structured(FairseqAdamConfig())
        cfg.lr_scheduler = schedule.InverseSquareRootLRScheduleConfig()
        for group, values in OPTIONS.items():
            for name, value in values.items():
                OmegaConf.update(cfg, f"{group}.{name}", value)
    task = Task(their_metrics)
    trainer = TheirTrainer(cfg, task, Model(tensors), Criterion())
    return lambda sample: trainer.train_step([sample])


def contestants() -> dict[int, dict[str, Callable[[Any], None]]]:
    """By the number of tensors. Ours are made first: once fairseq is loaded, a trainer
    of ours logs into its metrics."""
    made = {
        tensors: {
            "ctrainer": ours(tensors),
            "loop": loop(tensors),
            "forward and backward": forward_backward(tensors),
        }
        for tensors in UPDATES
    }
    if importlib.util.find_spec("fairseq") is not None:
        for tensors, steps in made.items():
            steps[PEER] = theirs(tensors)
    return made


def measure(
    steps: dict[str, Callable[[Any], None]], tensors: int, rounds: int
) -> dict[str, float]:
    """Microseconds of the CPU an update, of the turn that was disturbed least."""
    sample = {"x": torch.randn(ELEMS)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            for _ in range(UPDATES[tensors]):
                step(sample)
            if turn > 0:  # the first is for caches and lazy imports
                took = time.process_time() - begin
                times[name].append(took / UPDATES[tensors] * 1e6)
    return {name: min(turns) for name, turns in times.items()}


def line(
    name: str, peer: str, mine: float, other: float, goal: float | None = None,
    unit: str = "us",
) -> None:  # fmt: skip
    fields: dict[str, Any] = {
        "benchmark": "fairseq", "name": name, "peer": peer, "ours": mine,
        "theirs": other, "unit": unit, "ratio": other / mine,
    }  # fmt: skip
    if goal is not None:
        fields["goal"] = goal
    print(json.dumps(fields), flush=True)


def report(tensors: int, times: dict[str, float]) -> None:
    """The overhead is at least 1 us: a finer clock is not to be had."""
    case, update = f"{tensors} tensors of {ELEMS}", times["ctrainer"]
    overhead = max(update - times["loop"], 1.0)
    name = f"overhead of an update of fairseq's Trainer, {case}"
    if tensors == min(UPDATES):
        line(name, "the overhead allowed", overhead, OVERHEAD_ALLOWED_US, goal=1.0)
    else:
        allowed = TOTAL_ALLOWED * times["forward and backward"]
        whole = f"update of fairseq's Trainer, {case}"
        line(whole, "1.05 x forward and backward", update, allowed, goal=1.0)
    if PEER in times:
        line(name, PEER, overhead, times[PEER] - times["loop"])
        line(f"update of fairseq's Trainer, {case}", PEER, update, times[PEER])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report_memory(updates: int) -> None:
    """What an update leaves behind, over a long run; the first quarter is warm-up."""
    step, sample = ours(2), {"x": torch.randn(ELEMS)}
    sizes = []
    for _ in range(4):
        for _ in range(updates // 4):
            step(sample)
        sizes.append(resident_bytes())
    grown = max(statistics.mean(sizes[2:]) - sizes[0], 0.0) / (updates * 5 / 8)
    fields = {
        "benchmark": "fairseq", "name": f"memory an update, over {updates} updates",
        "unit": "bytes", "ours": grown, "allowed": GROWTH_ALLOWED_BYTES,
        "met": grown <= GROWTH_ALLOWED_BYTES,
    }  # fmt: skip
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--updates", type=int, default=LONG_RUN)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _C.set_num_threads(1)
    report_memory(options.updates)
    for tensors, steps in contestants().items():
        report(tensors, measure(steps, tensors, options.rounds))


if __name__ == "__main__":
    main()
