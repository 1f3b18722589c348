"""Machines of several ranks each: parameters that stay on a machine from the forward to
the backward pass, and quantized values that are sent between machines alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import missing_gradients as trainings
import pytest
import scenarios
import torch
from counting import Counting
from draws import draws
from fsdp_scenarios import check_same, mse, nested, tree, wrap
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C

LOCAL = 2  # ranks of a machine


class Machines:
    """The group of machines of LOCAL ranks, and what this rank gives to the collectives
    within and between them."""

    def __init__(self, group: _C.Communicator) -> None:
        within, between = (
            group.split(group.rank // LOCAL),
            group.split(group.rank % LOCAL),
        )
        whole = group.split(0)
        assert within is not None
        assert between is not None
        assert whole is not None
        self.within, self.between = Counting(within), Counting(between)
        self.group = _C.hierarchical_communicator(
            _C.Communicator(self.within), _C.Communicator(self.between), whole
        )

    def between_in(self, step: Callable[[], Any]) -> dict[str, int]:
        """Bytes of this rank's that cross to each other machine in a step."""
        self.between.sent.clear()
        step()
        sent = self.between.sent
        machines = self.between.world_size
        return {
            "gather": sent["all_gather"],
            "reduce": sent["all_to_all"] // machines,
            "other": sent["reduce_scatter"] + sent["all_reduce"],
        }


def on_machines(
    work: Callable[[Machines], Any], world: int = 2 * LOCAL, **more: Any
) -> list[Any]:
    return on_ranks(world, lambda group: work(Machines(group)), **more)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
    {"disable_reshard_on_root": False},
]


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_training_with_secondary_shards_equals_one_process(case: int) -> None:
    plain = tree()

    def train(machines: Machines) -> None:
        own, whole = copy.deepcopy(plain), copy.deepcopy(plain)
        options = {"secondary_shards": LOCAL, **OPTIONS[case]}
        check_same(machines.group, nested(machines.group, own, **options), whole)

    on_machines(train)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_secondary_shards_change_no_bit(dtype: str) -> None:
    plain = tree()

    def losses(group: _C.Communicator, **options: Any) -> list[float]:
        model = nested(group, copy.deepcopy(plain), compute_dtype=dtype, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            for part in range(2):
                waits = step > 1 and part == 0
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = mse(model, 2 * step + part, group)
                    loss.backward()
                found.append(loss.item())
            with torch.no_grad():  # an evaluation between a forward and a backward
                loss = mse(model, step, group)
                mse(model, step + 1, group)
            optimizer.step()
            optimizer.zero_grad()
        return found

    def train(machines: Machines) -> None:
        options = {"secondary_shards": LOCAL, "disable_reshard_on_root": False}
        assert losses(machines.group, **options) == losses(machines.group)

    on_machines(train)


def test_what_trains_on_one_level_trains_with_secondary_shards(tmp_path: Path) -> None:
    name = "what_trains_without_secondary_shards_trains_with_them"
    found = scenarios.outcomes(tmp_path, 2 * LOCAL, "fsdp_machine_scenarios")
    assert [told[name] for told in found] == [""] * 2 * LOCAL


def blocks(group: Any, **options: Any) -> Any:
    with seeded(0):
        module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    for i in range(4):
        module[i] = wrap(group, module[i], _shard_size_multiple=1, **options)
    return wrap(group, module, **options)


# Of 4 units of 64 x 64 on 2 machines of 2 ranks: a rank's part has 1024 elements.
PART, UNITS = 1024, 4


@pytest.mark.parametrize(
    ("options", "gathered", "reduced"),
    [
        ({}, 2 * 4 * PART, 4 * PART),
        ({"secondary_shards": LOCAL}, 4 * PART, 4 * PART),
        ({"gather_bits": 8}, 2 * (PART + 16), 4 * PART),
        ({"gather_bits": 8, "secondary_shards": LOCAL}, PART + 16, 4 * PART),
        ({"reduce_bits": 4}, 2 * 4 * PART, PART // 2 + 16),
        (
            {"gather_bits": 8, "reduce_bits": 4, "secondary_shards": LOCAL},
            PART + 16,
            PART // 2 + 16,
        ),
    ],
)
def test_what_crosses_between_machines(
    options: dict[str, Any], gathered: int, reduced: int
) -> None:
    def count(machines: Machines) -> None:
        model = blocks(machines.group, **options)

        def step() -> None:
            model(torch.ones(1, 64)).sum().backward()

        step()  # the first compares the units
        for _ in range(2):
            assert machines.between_in(step) == {
                "gather": UNITS * gathered,
                "reduce": UNITS * reduced,
                "other": 0,
            }

    on_machines(count)


def test_micro_batches_without_a_reduction_stay_within_the_machine() -> None:
    def count(machines: Machines) -> None:
        model = blocks(machines.group, secondary_shards=LOCAL)

        def update() -> None:
            for part in range(3):
                waits = part < 2
                with model.no_sync() if waits else contextlib.nullcontext():
                    model(torch.ones(1, 64)).sum().backward()

        update()
        found = machines.between_in(update)
        assert found["gather"] == UNITS * 4 * PART

    on_machines(count)


def test_memory_of_secondary_shards_is_a_machines_part_until_the_backward_ends() -> (
    None
):
    def measure(machines: Machines) -> None:
        model = blocks(machines.group, secondary_shards=LOCAL, compute_dtype="bfloat16")
        model(torch.ones(1, 64)).sum().backward()
        before = model._unit.live_bytes
        loss = model(torch.ones(1, 64)).sum()
        kept = UNITS * 64 * 64 // LOCAL * 2
        assert model._unit.live_bytes - before == kept
        loss.backward()
        assert model._unit.live_bytes == before
        with torch.no_grad():
            model(torch.ones(1, 64))
        assert model._unit.live_bytes == before

    on_machines(measure)


@pytest.mark.parametrize("used", ["forward", "gather", "backward"])
def test_values_that_change_after_the_forward_are_gathered_anew(used: str) -> None:
    with seeded(0):
        first = nn.Linear(64, 64, bias=False).weight

    def work(machines: Machines) -> None:
        model = blocks(machines.group, secondary_shards=LOCAL)
        x = torch.ones(1, 64, requires_grad=True)
        (given,) = torch.autograd.grad(model(x).sum(), x)
        before = model(x)
        doubled = {name: 2 * p for name, p in model.state_dict().items()}
        if used == "backward":
            model.load_state_dict(doubled)
            before.sum().backward()
            assert torch.allclose(x.grad, 2**UNITS * given)
            return
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        if used == "forward":
            assert torch.allclose(model(x), 2**UNITS * before)
        else:
            unit = model.module[0]
            unit._unit.gather()
            assert torch.equal(unit.full_params[0], 2 * first)
            unit._unit.release()

    on_machines(work)


def quantized(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to steps of 1/127 or 1/7 of the largest of 256 neighbours."""
    rows = values.reshape(-1, 256)
    most = 2 ** (bits - 1) - 1
    step = rows.abs().amax(1, keepdim=True) / most
    return ((rows / step).round() * step).reshape(values.shape)


def test_gradients_are_summed_in_a_machine_and_rounded_between_machines() -> None:
    """Against the formula in torch, on gradients that each rank draws; a rounding's
    tie may go the other way, by one step, where the sum's last bit differs."""
    n, ranks = 2048, 2 * LOCAL

    def draw(rank: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(rank))

    def reduce(machines: Machines) -> torch.Tensor:
        with seeded(0):
            module = nn.Linear(n, 1, bias=False)
        model = wrap(
            machines.group, module, reduce_bits=8, error_feedback=False,
            _shard_size_multiple=1,
        )  # fmt: skip
        (model(draw(machines.group.rank)[None])).sum().backward()
        part = next(iter(model.parameters())).grad
        assert part is not None
        found = torch.empty(n)
        machines.group.all_gather(found, part)
        return found

    sums = [
        torch.stack([draw(LOCAL * m + r) for r in range(LOCAL)]).double().sum(0)
        for m in range(2)
    ]
    rounded = [quantized(each.float() / ranks, 8) for each in sums]
    step = max(float(each.abs().max()) for each in sums) / ranks / 127
    for found in on_machines(reduce):
        different = (found - rounded[0] - rounded[1]).abs()
        assert float(different.max()) < 1.01 * step
        assert int((different > 1e-6).sum()) < n // 100


@pytest.mark.parametrize("start", range(0, draws(8, 120), 8))
def test_which_parameters_have_a_gradient_is_known_on_all_machines(start: int) -> None:
    """Of quantized gradients that some ranks do not have."""
    for number in range(start, start + 8):
        case = trainings.drawn(number)
        case["world"], case["hybrid"] = 4, False
        case["used"] = [
            [each[rank % len(each)] for rank in range(4)] for each in case["used"]
        ]
        expected = trainings.train_whole(case)
        options = {"reduce_bits": 8, "secondary_shards": LOCAL}
        if number % 3 == 0:
            options |= {"compute_dtype": "bfloat16"}

        def train(
            machines: Machines, case: Any = case, options: Any = options
        ) -> trainings.Trained:
            return trainings.train_sharded(case, machines.group, **options)

        for found in on_machines(train):
            trainings.compare(case, found, expected, exact=False)


def test_another_number_than_that_of_a_machines_ranks_is_rejected() -> None:
    plain = nn.Linear(4, 4)

    def make(machines: Machines) -> None:
        with pytest.raises(ValueError, match=r"is 4; expected .* 2 in this group"):
            wrap(machines.group, copy.deepcopy(plain), secondary_shards=4)

    on_machines(make)

    def alone(group: _C.Communicator) -> None:
        with pytest.raises(ValueError, match=r"1 in this group of 2 .shm"):
            wrap(group, copy.deepcopy(plain), secondary_shards=1)
        model: Any = wrap(group, copy.deepcopy(plain), secondary_shards=2)
        model(torch.ones(1, 4)).sum().backward()

    on_ranks(2, alone)
