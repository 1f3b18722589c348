"""When a unit's parameters go: after the last use of them, and not without notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH, ROWS = 6, 4


@pytest.fixture(autouse=True)
def _without_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoned pages cannot tell that they have been used."""
    monkeypatch.delenv("CTRAINER_FSDP_POISON")


def wrap(group: _C.Communicator, module: nn.Module, **options: Any) -> Any:
    return FSDP(module, process_group=group, on_neuron=False, **options)


class Body(nn.Module):
    """Units `a` and `b` between layers of the module around them, one frozen."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def frozen_above(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.head(torch.tanh(m.frozen(m.b(torch.tanh(m.a(x))))))


def detached_above(m: Any, x: torch.Tensor) -> torch.Tensor:
    inner = m.b(torch.tanh(m.a(x)))
    return m.head(torch.tanh(inner @ m.head.weight.detach()))


def recomputed_above(m: Any, x: torch.Tensor) -> torch.Tensor:
    inner = m.b(torch.tanh(m.a(x)))
    out: torch.Tensor = checkpoint(m.frozen, inner, use_reentrant=True)
    return m.head(torch.tanh(out))


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    inner = m.a(torch.tanh(m.frozen(m.b(torch.tanh(m.a(x))))))
    return m.head(inner) + m.b(inner)


def expected_of(plain: Body, x: torch.Tensor) -> dict[str, torch.Tensor]:
    plain(x).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return plain.state_dict()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("run", [frozen_above, detached_above, recomputed_above, twice])
def test_frozen_and_detached_weights_are_there_for_the_units_below_them(
    run: Callable[[Any, torch.Tensor], torch.Tensor], reshard: bool
) -> None:
    torch.manual_seed(0)
    base, x = Body(run), torch.randn(ROWS, WIDTH)
    expected = expected_of(copy.deepcopy(base), x)

    def train(group: _C.Communicator) -> None:
        model: Any = copy.deepcopy(base)
        for name in ("a", "b"):
            inner = wrap(group, getattr(model, name), reshard_after_forward=reshard)
            setattr(model, name, inner)
        model = wrap(group, model)
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name, value in model.full_state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-6), name

    on_ranks(2, train)


def test_a_closed_over_tensor_gets_its_gradient_through_a_frozen_unit() -> None:
    """Whose leaves and inputs are all done before: there are none."""

    class Mixed(nn.Module):
        prompt: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + torch.tanh(self.second(self.prompt))

    torch.manual_seed(0)
    base, x = Mixed(), torch.randn(ROWS, WIDTH)
    start = torch.randn(ROWS, WIDTH)

    def gradients(model: Any, mixed: Any) -> list[Any]:
        prompt = nn.Parameter(start.clone())
        given = x.clone().requires_grad_()
        mixed.prompt = prompt * 2
        model(given * 3).square().sum().backward()
        return [prompt.grad, given.grad]

    expected = gradients(base, base)

    def train(group: _C.Communicator) -> None:
        mixed = copy.deepcopy(base)
        found = gradients(wrap(group, mixed), mixed)
        for value, wanted in zip(found, expected, strict=True):
            assert torch.allclose(value, wanted, atol=1e-6)

    base.prompt = torch.empty(0)
    on_ranks(2, train)


def test_each_unit_is_released_when_its_backward_is_over() -> None:
    """Not at the end: between two units in a row nothing is there."""
    seen: list[int] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, units: Any) -> torch.Tensor:
            ctx.units = units
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append(sum(unit._unit.gathered for unit in ctx.units))
            return grad, None

    class Row(nn.Module):
        def __init__(self, units: list[Any]) -> None:
            super().__init__()
            self.units = nn.ModuleList(units)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for unit in self.units:
                x = Looks.apply(unit(x), list(self.units))
            return x

    layers = [nn.Linear(4, 4) for _ in range(5)]

    def train(group: _C.Communicator) -> None:
        model = wrap(group, Row([wrap(group, layer) for layer in layers]))
        model(torch.ones(2, 4, requires_grad=True) * 2).sum().backward()

    on_ranks(1, train)
    assert seen == [0, 0, 0, 0, 0]


class Keeps(nn.Module):
    """Two layers, and ways to use their weights that nobody could foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = torch.empty(0)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.first(x)
        self.kept = torch.tanh(self.second(x)) @ self.second.weight
        return out


def attribute_in_the_loss(model: Any, keeps: Any, x: torch.Tensor) -> None:
    (model(x).sum() + keeps.kept.square().sum()).backward()


def weight_outside(model: Any, keeps: Any, x: torch.Tensor) -> None:
    (model(x) @ keeps.first.weight).sum().backward()


def written_between_steps(model: Any, keeps: Any, x: torch.Tensor) -> None:
    nn.init.ones_(keeps.first.weight)
    model(x)


def weight_in_an_evaluation(model: Any, keeps: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)
        keeps.first.weight.sum()
        model(x)


@pytest.mark.parametrize(
    "use",
    [
        attribute_in_the_loss,
        weight_outside,
        written_between_steps,
        weight_in_an_evaluation,
    ],
)
def test_released_parameters_that_are_used_are_an_error(
    use: Callable[[Any, Any, torch.Tensor], None],
) -> None:
    base, x = Keeps(), torch.randn(ROWS, WIDTH)

    first = nn.Linear(WIDTH, WIDTH)

    def train(group: _C.Communicator) -> None:
        keeps = copy.deepcopy(base)
        inner = wrap(group, keeps)
        model = wrap(group, nn.Sequential(copy.deepcopy(first), inner))
        model(x)  # names are known from the first forward on
        with pytest.raises(
            RuntimeError, match=r"module '1' were read or written while .* released"
        ):
            use(model, keeps, x)
        model(x).sum().backward()  # told once
        assert model._unit.live_bytes == 0

    on_ranks(2, train)


def test_the_kinds_of_poison_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTRAINER_FSDP_POISON", "zeros")

    linear = nn.Linear(2, 2)

    def make(group: _C.Communicator) -> None:
        with pytest.raises(ValueError, match=r"CTRAINER_FSDP_POISON is 'zeros'"):
            wrap(group, linear)

    on_ranks(1, make)


def test_poisoned_parameters_are_nan_while_they_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CTRAINER_FSDP_POISON", "nan")

    base = nn.Linear(WIDTH, WIDTH)

    def train(group: _C.Communicator) -> None:
        linear = copy.deepcopy(base)
        model = wrap(group, linear)
        for _ in range(2):
            assert linear.weight.isnan().all()
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            (grad,) = {p.grad.isfinite().all().item() for p in model.parameters()}
            assert grad

    on_ranks(2, train)
