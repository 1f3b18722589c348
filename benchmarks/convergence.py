"""Four workers on scikit-learn's digits: synchronous training, BMUF and DiLoCo.

Each worker has a quarter of the 1,437 training images and takes batches of 16 of them;
all ways make the same number of updates with AdamW. Prints a row of JSON for each way
and, with --picture, draws the loss on the 360 other images. Needs torch, scikit-learn,
and for the picture matplotlib.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ranks
import torch
from sklearn.datasets import load_digits
from torch import nn

import ctrainer
from ctrainer import optim
from ctrainer.comm import from_environment

RANKS, UPDATES, BATCH, LOOK = 4, 400, 16, 20


def images() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.manual_seed(0))
    values = torch.tensor(digits.data, dtype=torch.float32) / 16
    return values[order], torch.tensor(digits.target)[order]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Synchronous:
    """Averages the gradients of every update."""

    def __init__(self, optimizer: Any, group: ctrainer.Communicator) -> None:
        self.optimizer, self.group = optimizer, group

    def step(self) -> None:
        for parameters in self.optimizer.param_groups:
            for parameter in parameters["params"]:
                self.group.all_reduce(parameter.grad, "mean")
        self.optimizer.step()


def bmuf(every: int, bits: int = 32) -> Callable[[Any, ctrainer.Communicator], Any]:
    cfg = SimpleNamespace(
        global_sync_iter=every,
        warmup_iterations=20,
        block_momentum=0.5,
        delta_bits=bits,
    )
    return lambda optimizer, group: ctrainer.BMUF(cfg, optimizer, group)


def diloco(every: int) -> Callable[[Any, ctrainer.Communicator], Any]:
    return lambda optimizer, group: ctrainer.BMUF.diloco(optimizer, group, every=every)


# Updates between meetings, and the bits in which values travel then.
WAYS: dict[str, tuple[int, int, Callable[[Any, ctrainer.Communicator], Any]]] = {
    "one worker": (0, 32, lambda optimizer, group: optimizer),
    "synchronous": (1, 32, Synchronous),
    "BMUF, every 10": (10, 32, bmuf(10)),
    "BMUF, every 10, 8 bits": (10, 8, bmuf(10, 8)),
    "BMUF, every 10, 4 bits": (10, 4, bmuf(10, 4)),
    "DiLoCo, every 10": (10, 32, diloco(10)),
    "DiLoCo, every 50": (50, 32, diloco(50)),
}


def train(make: Callable[[Any, ctrainer.Communicator], Any], group: Any) -> list[float]:
    """The loss on the held out images after every LOOK updates, of the workers' mean
    model: what a meeting at that moment would give plain averaging."""
    values, targets = images()
    own = torch.arange(360 + group.rank, len(targets), RANKS)
    batches = torch.Generator().manual_seed(group.rank)
    model = network()
    stepper = make(optim.AdamW(model.parameters(), lr=2e-3), group)
    losses = []
    for update in range(1, UPDATES + 1):
        chosen = own[torch.randint(len(own), (BATCH,), generator=batches)]
        nn.functional.cross_entropy(model(values[chosen]), targets[chosen]).backward()
        stepper.step()
        model.zero_grad()
        if update % LOOK == 0:
            losses.append(held_out(model, values[:360], targets[:360], stepper, group))
    return losses


def held_out(
    model: nn.Module, values: Any, targets: Any, stepper: Any, group: Any
) -> float:
    mean = network()
    mean.load_state_dict(model.state_dict())
    if isinstance(stepper, ctrainer.BMUF):
        for parameter in mean.parameters():
            group.all_reduce(parameter.detach(), "mean")
    with torch.no_grad():
        return float(nn.functional.cross_entropy(mean(values), targets))


def megabytes(every: int, bits: int) -> float:
    """What a worker of a ring sends in all updates; of codes also their scales."""
    each = 4 if bits == 32 else bits / 8 + 4 / 256
    n = sum(p.numel() for p in network().parameters())
    meetings = UPDATES // every if every else 0
    return meetings * 2 * (RANKS - 1) / RANKS * n * each / 1e6


def be_rank(picture: str | None) -> None:
    torch.set_num_threads(1)
    group = from_environment(120.0)
    found = {name: train(make, group) for name, (_, _, make) in WAYS.items()}
    if group.rank > 0:
        return
    for name, (every, bits, _) in WAYS.items():
        row = {"name": name, "loss": found[name][-1],
               "sent_mb": megabytes(every, bits)}  # fmt: skip
        print(json.dumps(row), flush=True)
    if picture:
        draw(found, picture)


def draw(found: dict[str, list[float]], picture: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for name, losses in found.items():
        axes.plot(range(LOOK, UPDATES + 1, LOOK), losses, label=name, linewidth=1.2)
    axes.set(xlabel="update", ylabel="loss on other images", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", help="a png, svg or pdf to draw")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(options.picture)
        return
    sys.exit(ranks.start(RANKS, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    main()
