"""The memory that a sharded module takes, beside what is said to be needed."""

from __future__ import annotations

import gc
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import draws
from fsdp_scenarios import wrap
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import UnitSize, memory_plan, units_of
from ctrainer.optim import _disk

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


class Eighths(nn.Module):
    """A frozen linear layer of 8-bit weights, with a scale and a trained bias."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randint(-9, 9, (width, width), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


# And bytes of an element's state: of moments of the shard's dtype, as float32.
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "AdamW": (optim.AdamW, 8),
    "AdamW8bit": (partial(optim.AdamW8bit, min_8bit_size=1), 2 + 2 * 4 / 256),
    "SGD": (partial(optim.SGD, momentum=0.9), 4),
    "AdamW on disk": (optim.AdamW, 8),
}


def drawn_model(draw: random.Random, wrapped: Any, width: int) -> Any:
    """Layers that train, that are frozen, and that are quantized, in units of their
    own between two layers of the root."""
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    compute = draw.choice([dtype, torch.bfloat16, torch.float32])
    options: dict[str, Any] = {"compute_dtype": compute}
    options["fp32_reduce_scatter"] = draw.random() < 0.5
    kinds = [draw.choice(["trained", "frozen", "quantized"]) for _ in "abc"]
    kinds.append("trained")  # the fullest unit is the first of the backward pass
    with seeded(0):
        layers: list[nn.Module] = [
            Eighths(width, dtype) if kind == "quantized"
            else nn.Linear(width, width, dtype=dtype)
            for kind in kinds
        ]  # fmt: skip
        ends = [nn.Linear(*sizes, dtype=dtype) for sizes in ((ENDS, width), (width, 2))]
    for kind, layer in zip(kinds, layers, strict=True):
        if kind == "frozen":
            layer.requires_grad_(False)
    inner = [wrapped(layer, **options) for layer in layers]
    return wrapped(nn.Sequential(ends[0], *inner, ends[1]), **options)


@pytest.mark.parametrize("number", range(draws(8, 200)))
def test_the_plan_of_any_model_is_what_the_engine_counts(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any dtypes, frozen and quantized layers, state of any kind, and with secondary
    shards: shards, gradients and state to the byte; gathered parameters, gradients to
    reduce and secondary shards within 3 %, as lines and pages are filled up."""
    monkeypatch.setattr(_disk, "_LEAST", 1)  # bytes, for small models
    draw = random.Random(number)
    world, width = (1, 2, 4)[number % 3], draw.choice([128, 192])
    reshards = world == 4 or draw.random() < 0.5
    name = draw.choice(sorted(OPTIMIZERS))
    make, item = OPTIMIZERS[name]
    local = 2 if world == 4 else None
    prefetch = {} if draw.random() < 0.5 else PREFETCH
    seed = draw.random()

    def measure(group: _C.Communicator) -> None:
        of_units = {**prefetch, "secondary_shards": local}
        of_units["reshard_after_forward"] = reshards
        whole = group if local is None else in_machines(group, local)
        model = drawn_model(
            random.Random(seed),
            lambda m, **o: wrap(whole, m, _shard_size_multiple=256, **of_units, **o),
            width,
        )
        full, wide = model.compute_dtype, model.fp32_reduce_scatter
        moment = next(p for p in model.parameters() if p.requires_grad).dtype.itemsize
        of_state = item if "8bit" in name else item * moment / 4
        plan = memory_plan(
            units_of(model), world, secondary_shards=local, optimizer_bytes=of_state,
            compute_dtype=str(full)[6:], prefetch=len(prefetch) // 2,
            reduce_dtype="float32" if wide else None, shard_size_multiple=256,
            offload_optimizer="nvme" if "disk" in name else None,
            reshard_after_forward=reshards,
        )  # fmt: skip
        optimizer = make(p for p in model.parameters() if p.requires_grad)
        if "disk" in name:
            optimizer.offload_state(str(tmp_path))
        for step in range(2):
            model._unit.peak_bytes = 0
            loss = model(torch.ones(2, ENDS, dtype=full)).float().square().sum()
            loss.backward()
            if step == 0:
                optimizer.step()
        params = list(model.parameters())
        assert bytes_of(params) == plan.parameters
        assert bytes_of(p.grad for p in params if p.grad is not None) == plan.gradients
        kept = ["exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"]
        kept += ["absmax1", "absmax2"]
        states = [state[k] for state in optimizer.state.values() for k in kept
                  if k in state]  # fmt: skip
        assert bytes_of(states) == plan.optimizer
        if "disk" in name:
            padding = optimizer._disk_state.memory.nbytes - plan.disk
            assert 0 <= padding < 4096 * len(states)  # each begins on a page
        peak = model._unit.peak_bytes
        assert peak <= plan.transient * 1.03
        assert peak >= (plan.transient - plan.prefetched) * 0.97

    on_ranks(world, measure)


def in_machines(group: _C.Communicator, local: int) -> _C.Communicator:
    within, between = group.split(group.rank // local), group.split(group.rank % local)
    whole = group.split(0)
    assert within is not None
    assert between is not None
    assert whole is not None
    return _C.hierarchical_communicator(within, between, whole)


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


@pytest.mark.parametrize("returns", [True, False])
def test_what_loading_a_model_left_behind_is_returned_at_its_first_forward(
    returns: bool,
) -> None:
    """Pieces too short for the memory that units share, of 32 MiB."""
    group = _C.Communicator(Alone(1))
    model = wrap(group, nn.Linear(2, 2), return_memory=returns)
    pieces = [torch.ones(16 << 10) for _ in range(512)]
    kept = torch.ones(16 << 10)  # the end of the heap
    del pieces
    before = resident_kib("RssAnon")
    model(torch.ones(1, 2))
    returned = before - resident_kib("RssAnon")
    assert kept.sum().item() == 16 << 10
    if returns:
        assert returned > 24 << 10
    else:
        assert returned < 1 << 10
