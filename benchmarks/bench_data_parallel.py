"""A data-parallel step of 2 processes with DataParallel against torch's
DistributedDataParallel over gloo: a GPT of 29.5M parameters (8 blocks, width 512, 8192
tokens, tied head), 4 sequences of 128 tokens a rank, AdamW, gradients clipped to 1.

The two take turns. Figures are medians of the turns: of a step in CPU time, which other
programs on the machine change least, and on the clock; with torch's optimizer in both,
and with each one's own. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ctrainer
from ctrainer import optim
from ctrainer.comm import world

RANKS = 2
BLOCKS, WIDTH, HEADS, VOCABULARY = 8, 512, 8, 8192
SEQUENCES, TOKENS = 4, 128
GOAL = 1.08

Step = Callable[[], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.tokens, self.places):  # wider ones make a softmax of zeros
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores = nn.functional.linear(self.norm(x), self.tokens.weight)
        flat = scores[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(flat, ids[:, 1:].flatten())


def with_torch(model: nn.Module, ids: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_ours(model: nn.Module, ids: torch.Tensor) -> Step:
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(ids).backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()

    return step


def turns(
    group: ctrainer.Communicator, steps: dict[str, Step], n: int
) -> dict[str, tuple[float, float]]:
    """Median CPU and clock seconds of each, over both ranks; ranks start together."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(n + 2):  # the first two make state, and fault in memory
        for name, step in steps.items():
            group.barrier()
            cpu, clock = time.process_time(), time.perf_counter()
            step()
            spent = torch.tensor(
                [time.process_time() - cpu, time.perf_counter() - clock],
                dtype=torch.float64,
            )
            group.all_reduce(spent, "mean")
            if turn > 1:
                taken[name].append((spent[0].item(), spent[1].item()))
    return {
        name: tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in taken.items()
    }


def tell(name: str, peer: str, ours: float, theirs: float) -> None:
    row = {"name": name, "unit": "ms", "ours": ours * 1e3, "peer": peer,
           "theirs": theirs * 1e3, "ratio": theirs / ours, "goal": GOAL}  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def be_rank(n: int) -> None:
    torch.set_num_threads(1)
    group = world(120.0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    models = [GPT() for _ in range(3)]
    torch.manual_seed(1 + group.rank)
    ids = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    medians = turns(
        group,
        {
            "torch": with_torch(DistributedDataParallel(models[0]), ids),
            "wrapper": with_torch(ctrainer.DataParallel(models[1], group), ids),
            "both": with_ours(ctrainer.DataParallel(models[2], group), ids),
        },
        n,
    )
    what = "data-parallel step of GPT, 29.5M parameters, 2 processes"
    for i, clock in enumerate(("CPU time", "on the clock")):
        theirs = medians["torch"][i]
        tell(f"{what}, {clock}", "torch's DDP, gloo", medians["both"][i], theirs)
        tell(f"{what}, torch's AdamW in both, {clock}", "torch's DDP, gloo",
             medians["wrapper"][i], theirs)  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(3 if options.quick else 11)
        return
    sys.exit(ranks.start(RANKS, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    main()
