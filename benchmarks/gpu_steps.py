"""Whole steps on a GPU: ctrainer's Trainer beside transformers', on the same batches.

GPT-2 small and MiniLM's architecture with random weights, in bf16 and in fp32. The two
take turns in one process; a time is the wall clock's over some updates, from an idle
GPU to an idle GPU. Then some updates of each are traced: the idle share is the part of
the trace in which no kernel runs. Then evaluate() of batches as large, without
predictions, is timed. Prints lines of JSON. --small: a small model, for the emulated
device, on which transformers' Trainer does not train.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from gpu_device import EMULATED, device, wait
from torch import nn

import ctrainer

WARM_UP = 5  # updates before the clock is read
EVALUATED = 40  # batches

# A model, the rows of a batch, their length.
Task = tuple[Callable[[], nn.Module], int, int]


def gpt2(**sizes: Any) -> nn.Module:
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def minilm(**sizes: Any) -> nn.Module:
    """sentence-transformers/all-MiniLM-L6-v2's shape, predicting masked words."""
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
             "intermediate_size": 1536}  # fmt: skip
    return transformers.BertForMaskedLM(transformers.BertConfig(**(shape | sizes)))


TINY = {"vocab_size": 64}
TASKS: dict[str, Task] = {
    "GPT-2 small, 8 x 512 tokens": (gpt2, 8, 512),
    "MiniLM, 64 x 128 tokens": (minilm, 64, 128),
    "MiniLM, 8 x 32 tokens": (minilm, 8, 32),
}
SMALL: dict[str, Task] = {
    "a small GPT-2, 2 x 8 tokens": (
        lambda: gpt2(n_embd=16, n_layer=1, n_head=2, n_positions=8, **TINY), 2, 8
    )
}  # fmt: skip
CONTESTANTS: dict[str, tuple[Any, Any]] = {
    "ctrainer": (ctrainer.Trainer, ctrainer.TrainingArguments),
    "transformers": (transformers.Trainer, transformers.TrainingArguments),
}


def idle_share(profile: Any) -> float | None:
    """The part of the GPU's trace in which it runs nothing; None without a trace."""
    kind = torch.autograd.DeviceType.CUDA
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == kind
    )
    if not spans:
        return None
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


class Clock(transformers.TrainerCallback):
    """Reads the clock after the first updates and after the last one, and traces the
    `traced` ones that follow."""

    def __init__(self, updates: int, traced: int) -> None:
        self.last, self.traced = WARM_UP + updates, traced
        self.start = self.seconds = self.evaluation = 0.0
        self.profile: Any = None

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step not in (WARM_UP, self.last):
            return
        wait(next(model.parameters()))
        now = time.perf_counter()
        if state.global_step == WARM_UP:
            self.start = now
            return
        self.seconds = (now - self.start) / (self.last - WARM_UP)
        if self.traced:
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            self.profile = torch.profiler.profile(activities=kinds)
            self.profile.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.profile is not None:
            self.profile.__exit__(None, None, None)


def run(
    name: str, base: nn.Module, task: Task, bf16: bool, updates: int, traced: int
) -> Clock:
    trainer_class, args_class = CONTESTANTS[name]
    _, batch, length = task
    torch.manual_seed(0)
    model: Any = copy.deepcopy(base)
    ids = torch.randint(0, model.config.vocab_size, (4 * batch, length))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = args_class(
        tempfile.gettempdir(), max_steps=WARM_UP + updates + traced, save_strategy="no",
        per_device_train_batch_size=batch, per_device_eval_batch_size=batch, bf16=bf16,
        report_to="none", logging_steps=1000, disable_tqdm=True,
        prediction_loss_only=True,
        use_cpu=EMULATED and name == "transformers",
    )  # fmt: skip
    clock = Clock(updates, traced)
    trainer = trainer_class(model, args, train_dataset=rows, callbacks=[clock])
    for printer in (ctrainer.PrinterCallback, transformers.PrinterCallback):
        trainer.remove_callback(printer)
    trainer.train()
    trainer.evaluate(rows)
    start = time.perf_counter()
    trainer.evaluate(rows * (EVALUATED // 4))
    clock.evaluation = time.perf_counter() - start
    return clock


def measure(name: str, task: Task, bf16: bool, updates: int, rounds: int) -> None:
    times: dict[str, list[float]] = {who: [] for who in CONTESTANTS}
    evaluations: dict[str, list[float]] = {who: [] for who in CONTESTANTS}
    idle: dict[str, float | None] = {}
    torch.manual_seed(0)
    base = task[0]()  # once: its random values take seconds
    for turn in range(rounds):
        for who, kept in times.items():
            traced = 5 if turn == rounds - 1 and not EMULATED else 0
            clock = run(who, base, task, bf16, updates, traced)
            kept.append(clock.seconds)
            evaluations[who].append(clock.evaluation / EVALUATED)
            idle[who] = idle_share(clock.profile) if clock.profile else None
    kind = "bf16" if bf16 else "fp32"
    compare(f"a step, {name}, {kind}", times, idle=idle)
    compare(f"a batch of evaluate(), {name}, {kind}", evaluations)


def compare(name: str, times: dict[str, list[float]], **more: Any) -> None:
    ours, theirs = (statistics.median(kept) for kept in times.values())
    line = {
        "benchmark": "gpu_steps", "name": name, "peer": "transformers", "unit": "ms",
        "ours": ours * 1e3, "theirs": theirs * 1e3, "ratio": theirs / ours, "goal": 1.0,
        **more,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device()
    for name, task in (SMALL if options.small else TASKS).items():
        for bf16 in (True, False):
            measure(name, task, bf16, options.updates, options.rounds)


if __name__ == "__main__":
    main()
