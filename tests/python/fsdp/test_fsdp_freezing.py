"""Parameters of sharded modules that are frozen, and trained again, between updates."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from draws import draws
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH, ROWS, WORLD = 6, 4, 2
FLAT_PARTS = ("flat", "module")  # no part of a flat parameter can be frozen
ROWS_OF = {
    "each": {},
    "flat": {"flatten_parameters": True},
    "views": {"flatten_parameters": True, "use_orig_params": True},
}
# Which parameters are frozen in each update; all are trained elsewhere.
PLANS: dict[str, list[tuple[str, ...]]] = {
    "from the first update on": [("2.",), ("2.",), ("2.",)],
    "from the second update on": [(), ("2.",), ("2.",)],
    "trained again": [("2.",), (), ("2.",), ()],
    "one after the other": [("0.",), ("2.",), ("4.",)],
    "all but one": [("0.", "4."), ("0.", "4.")],
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def batches(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(WORLD * ROWS, WIDTH, generator=draw) for _ in range(count)]


def update(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def plainly(plan: list[tuple[str, ...]]) -> dict[str, torch.Tensor]:
    model = network()
    # Momentum and decay move what gets a gradient of zeros, too.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    )
    for frozen, x in zip(plan, batches(len(plan)), strict=True):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen or ("none",)))
        update(model, optimizer, x)
    return model.state_dict()


def wrapped(model: Any, group: _C.Communicator, **options: Any) -> Any:
    """Two units of one layer each, and the root with the last one."""
    given = {"process_group": group, "on_neuron": False, **options}
    for place in (0, 2):
        model[place] = FSDP(model[place], **given)
    return FSDP(model, **given)


def layer_of(model: Any, name: str) -> Any:
    """What computes."""
    return model[int(name[0])]


def parameters_of(model: Any, name: str) -> list[nn.Parameter]:
    """What optimizers have of it."""
    if name != "4.":
        return list(layer_of(model, name).parameters())
    inside = {id(p) for place in (0, 2) for p in model[place].parameters()}
    return [p for p in model.parameters() if id(p) not in inside]


@pytest.mark.parametrize("by", ["optimizer", "module"])
@pytest.mark.parametrize("rows", ROWS_OF)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_frozen_after_wrapping_is_not_trained(
    plan: str, rows: str, by: str
) -> None:
    expected, inputs = plainly(PLANS[plan]), batches(len(PLANS[plan]))
    copies = [network() for _ in range(WORLD)]

    def train(group: _C.Communicator) -> None:
        model = wrapped(copies[group.rank], group, **ROWS_OF[rows])
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        for frozen, x in zip(PLANS[plan], inputs, strict=True):
            for name in ("0.", "2.", "4."):
                layer = layer_of(model, name)
                params = parameters_of(model, name)
                if by == "module" and rows != "flat":
                    params = [layer.weight, layer.bias]
                for param in params:
                    param.requires_grad_(name not in frozen)
            update(model, optimizer, x.chunk(WORLD)[group.rank])
        assert model._unit.live_bytes == 0
        for name, value in model.full_state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-6), name
        model = copy.deepcopy(model)
        update(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs[0])
        for name, value in model.full_state_dict().items():
            still = name.startswith(PLANS[plan][-1] or ("none",))
            assert torch.equal(value, expected[name]) <= still
            assert torch.allclose(value, expected[name], atol=1e-6) or not still

    on_ranks(WORLD, train)


def test_one_weight_of_a_row_may_be_frozen_where_each_has_a_view() -> None:
    plain = network()
    plain[2].bias.requires_grad_(False)
    copies = [network() for _ in range(WORLD)]
    (x,) = batches(1)

    def optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    update(plain, optimizer(plain), x)
    expected = plain.state_dict()

    def train(group: _C.Communicator) -> None:
        model = wrapped(copies[group.rank], group, **ROWS_OF["views"])
        model[2].bias.requires_grad_(False)
        update(model, optimizer(model), x.chunk(WORLD)[group.rank])
        for name, value in model.full_state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-4), name
        assert torch.equal(model.full_state_dict()["2.bias"], expected["2.bias"])

    on_ranks(WORLD, train)


def test_what_cannot_be_frozen_or_trained_is_named() -> None:
    models = [network(), network()]
    (x,) = batches(1)

    def run(group: _C.Communicator) -> None:
        flat = wrapped(models[0], group, flatten_parameters=True)
        flat[2].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"bias.requires_grad is False.* flat"):
            flat(x)
        flat[2].bias.requires_grad_(True)
        flat(x).sum().backward()
        models[1][2].requires_grad_(False)
        model = wrapped(models[1], group)
        for param in model.parameters():
            param.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"weight requires .* frozen when"):
            model(x)

    on_ranks(1, run)


def freeze(model: nn.Module, names: tuple[str, ...], by: str) -> None:
    for name in ("0.", "2.", "4."):
        layer = layer_of(model, name)
        held = [layer.weight, layer.bias]
        if by == "optimizer" and isinstance(model, FSDP):
            held = parameters_of(model, name)
        for param in held:
            param.requires_grad_(name not in names)


def passes(model: Any, plan: list[Any], inputs: list[torch.Tensor], by: str) -> None:
    """Forwards, each with what is frozen in it and whether it is recorded, then the
    backward of the recorded ones with what is frozen there, and an update."""
    *forwards, last = plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: Any = 0.0
    for (frozen, records), x in zip(forwards, inputs, strict=True):
        freeze(model, frozen, by)
        with torch.set_grad_enabled(records):
            value = model(x).square().mean()
        loss = loss + value * (1.0 if records else 0.5)
    freeze(model, last, by)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    freeze(model, (), by)


@pytest.mark.parametrize(
    ("rows", "by"),
    [(r, b) for r in ROWS_OF for b in ("optimizer", "module") if (r, b) != FLAT_PARTS],
)
def test_freezing_between_passes_is_that_of_a_whole_model(rows: str, by: str) -> None:
    draw = random.Random(rows)

    def some() -> tuple[str, ...]:
        return tuple(name for name in ("0.", "2.", "4.") if draw.random() < 0.4)

    for _ in range(draws(6, 100)):
        count = draw.randint(1, 4)
        plan: list[Any] = [(some(), draw.random() < 0.6) for _ in range(count)]
        plan += [((), True), some()]  # there is something to go backward from
        inputs = batches(count + 1)
        plain = network()
        passes(plain, plan, inputs, by)
        copies, expected = [network() for _ in range(WORLD)], plain.state_dict()

        def train(
            group: _C.Communicator, plan: Any = plan, inputs: Any = inputs,
            copies: Any = copies, expected: Any = expected,
        ) -> None:  # fmt: skip
            model = wrapped(copies[group.rank], group, **ROWS_OF[rows])
            passes(model, plan, [x.chunk(WORLD)[group.rank] for x in inputs], by)
            for name, value in model.full_state_dict().items():
                assert torch.allclose(value, expected[name], atol=1e-6), (plan, name)
            assert model._unit.live_bytes == 0

        on_ranks(WORLD, train)
