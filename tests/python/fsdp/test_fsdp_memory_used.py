"""The memory that a sharded module takes, beside what is said to be needed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_scenarios import wrap
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import UnitSize, memory_plan

WIDTH, DEPTH, ENDS = 192, 6, 8
PREFETCH: dict[str, Any] = {
    "forward_prefetch": True,
    "backward_prefetch": "BACKWARD_PRE",
}


def blocks(group: Any, width: int, depth: int, **options: Any) -> Any:
    """Units of one layer each between two small ones, which the root has."""
    units = []
    for _ in range(depth):  # one whole layer at a time
        with seeded(0):
            layer = nn.Linear(width, width)
        units.append(wrap(group, layer, **options))
    with seeded(0):
        ends = nn.Linear(ENDS, width), nn.Linear(width, ENDS)
    return wrap(group, nn.Sequential(ends[0], *units, ends[1]), **options)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, ENDS)).sum().backward()
        optimizer.step()


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_engine_holds_what_the_plan_says(world: int, prefetch: int) -> None:
    """Everything / world_size, a gathered unit with its gradients, and one prefetched,
    within 5 %."""
    layer, ends = WIDTH * WIDTH + WIDTH, 2 * WIDTH * ENDS + WIDTH + ENDS
    sizes = [UnitSize((ends,), kept=True)] + [UnitSize((layer,))] * DEPTH
    plan = memory_plan(sizes, world, prefetch=prefetch)

    def measure(group: _C.Communicator) -> None:
        options = PREFETCH if prefetch else {}
        model = blocks(group, WIDTH, DEPTH, **options)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, 2)
        model._unit.peak_bytes = 0
        train(model, optimizer, 2)
        params = list(model.parameters())
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        assert bytes_of(params) == plan.parameters
        assert bytes_of(p.grad for p in params) == plan.gradients
        assert bytes_of(states) == plan.optimizer
        transient = plan.gathered + plan.prefetched + plan.full_gradients
        assert model._unit.peak_bytes == pytest.approx(transient, rel=0.05)

    on_ranks(world, measure)


class Alone:
    """Rank 0 of some ranks that are not there: they have sharded the same module, of
    zeros."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def begin(self, what: str, out: Any, in_: Any, dtype: str, *unused: Any) -> Alone:
        if what == "all_gather" and dtype == "int64":
            out[:] = bytes(in_) * self.world_size
        elif what == "all_gather":
            out[: in_.nbytes] = in_
        elif what == "reduce_scatter":
            out[:] = in_[: out.nbytes]
        return self

    def wait(self) -> None:
        pass


def resident_kib(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def test_the_process_takes_less_than_a_third_of_what_it_would_without_sharding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """48 MiB of parameters and three times as much for gradients and Adam, over 8
    ranks: 24 MiB, and 2 MiB three times for a unit. The bound leaves room for what
    malloc keeps."""
    width, depth = 724, 24
    without = 4 * depth * width * width * 4 >> 10
    monkeypatch.delenv("CTRAINER_FSDP_POISON")  # which takes all the pages
    gc.collect()
    before = resident_kib("VmRSS")
    model = blocks(_C.Communicator(Alone(8)), width, depth, **PREFETCH)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    train(model, optimizer, 3)
    assert resident_kib("VmHWM") - before < without / 3
