"""Parameters that a forward, or a user between forwards, changes or replaces.

A plain module trains on with what it was changed to; a sharded one cannot, and raises.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH = 5


class Changing(nn.Linear):
    """Changes its weight or bias in the forward, in one of the ways in WAYS."""

    way, name, only_in_training = "", "weight", True

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = super().forward(x)
        if self.training or not self.only_in_training:
            WAYS[self.way](self, self.name)
        return early if self.way == "assign_other_dtype" else super().forward(x)


def write(module: nn.Module, name: str) -> None:
    with torch.no_grad():
        getattr(module, name).mul_(0.9)


def write_to_data(module: nn.Module, name: str) -> None:
    getattr(module, name).data.mul_(0.9)


def write_one_element(module: nn.Module, name: str) -> None:
    getattr(module, name).data.view(-1)[-1] = 7.0


def write_a_nan(module: nn.Module, name: str) -> None:
    getattr(module, name).data.view(-1)[0] = float("nan")


def assign_data(module: nn.Module, name: str) -> None:
    param = getattr(module, name)
    param.data = param.data * 0.9


def assign_other_dtype(module: nn.Module, name: str) -> None:
    param = getattr(module, name)
    param.data = param.data.double()


def assign_data_of_another(module: nn.Module, name: str) -> None:
    """In the unit's own memory."""
    param = getattr(module, name)
    param.data = module.other.data.view(-1)[: param.numel()].view(param.shape)


def assign_parameter(module: nn.Module, name: str) -> None:
    setattr(module, name, nn.Parameter(getattr(module, name).detach() * 0.9))


def move(module: nn.Module, name: str) -> None:
    """As cuDNN's layers do: the same values in other memory."""
    param = getattr(module, name)
    param.data = param.data.clone()


def nothing(module: nn.Module, name: str) -> None:
    pass


WAYS: dict[str, Any] = {
    f.__name__: f
    for f in (
        nothing, move, write, write_to_data, write_one_element, write_a_nan,
        assign_data, assign_other_dtype, assign_data_of_another, assign_parameter,
    )
}  # fmt: skip
MESSAGES = {
    "assign_data": r"^{name}\.data has been assigned since its module was wrapped",
    "assign_other_dtype": r"^{name}\.data has been assigned",
    "assign_data_of_another": r"^{name}\.data has been assigned",
    "assign_parameter": r"^{name} is another object than when its module was",
}
REJECTED = [way for way in WAYS if way not in ("nothing", "move")]


def model_of(way: str, name: str = "weight", **attributes: Any) -> nn.Sequential:
    with seeded(0):
        model = nn.Sequential(Changing(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    vars(model[0]).update(way=way, name=name, **attributes)
    return model


def sharded(model: nn.Module, group: _C.Communicator, **options: Any) -> Any:
    options = {"on_neuron": False, "process_group": group, **options}
    model = copy.deepcopy(model)
    for number in (0, 2):
        model[number] = FSDP(model[number], **options)  # type: ignore[index, operator]
    return FSDP(model, **options)


def step(model: nn.Module, seed: int, lr: float = 0.1) -> float:
    with seeded(seed):
        x = torch.randn(3, WIDTH)
    loss = model(x).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr).step()
    model.zero_grad()
    return loss.item()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("way", REJECTED)
def test_a_forward_that_changes_a_parameter_raises(
    way: str, name: str, ranks: int
) -> None:
    """On a rank at least that has the element, where a change has no version."""
    expected = MESSAGES.get(way, r"^{name} was changed in the forward of its")
    seen = []

    def train(group: _C.Communicator) -> None:
        model = sharded(model_of(way, name), group)
        try:
            model[0](torch.ones(3, WIDTH))
        except RuntimeError as error:
            seen.append(str(error))

    on_ranks(ranks, train)
    assert len(seen) == (ranks if way == "write" or way.startswith("assign") else 1)
    for text in seen:
        with pytest.raises(RuntimeError, match=expected.format(name=name)):
            raise RuntimeError(text)


OPTIONS: list[dict[str, Any]] = [
    {"use_orig_params": True},
    {"flatten_parameters": True},
    {"compute_dtype": torch.bfloat16},
    {"reshard_after_forward": False},
    {"cpu_offload": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda it: next(iter(it)))
@pytest.mark.parametrize("way", REJECTED)
def test_whatever_the_options_of_the_unit(way: str, options: dict[str, Any]) -> None:
    def train(group: _C.Communicator) -> None:
        model = sharded(model_of(way), group, **options)
        with pytest.raises(RuntimeError, match=r"^0\.weight"):
            step(model, 0)

    on_ranks(1, train)


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
@pytest.mark.parametrize("way", ["nothing", "move"])
def test_a_parameter_that_only_moves_trains_as_ever(
    way: str, options: dict[str, Any]
) -> None:
    def train(group: _C.Communicator) -> None:
        expected = sharded(model_of("nothing"), group, **options)
        model = sharded(model_of(way), group, **options)
        home = model.module[0].module.weight.data_ptr()
        for seed in range(3):
            assert step(model, seed) == step(expected, seed)
            assert model.module[0].module.weight.data_ptr() == home
        states = model.full_state_dict(), expected.full_state_dict()
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key])

    on_ranks(2, train)


def test_frozen_parameters_and_evaluations_count_too() -> None:
    def train(group: _C.Communicator) -> None:
        frozen = model_of("write")
        frozen[0].requires_grad_(False)
        with pytest.raises(
            RuntimeError, match=r"^0\.weight was changed in the forward"
        ):
            step(sharded(frozen, group), 0)
        evaluated = sharded(model_of("write", only_in_training=False), group).eval()
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"^0\.weight"):
            evaluated(torch.ones(1, WIDTH))

    on_ranks(2, train)


def test_an_embedding_with_max_norm_is_rejected() -> None:
    """torch changes the rows in place."""

    def train(group: _C.Communicator) -> None:
        with seeded(0):
            module = nn.Embedding(7, 3, max_norm=0.5)
        model = FSDP(module, process_group=group)
        with pytest.raises(RuntimeError, match=r"^weight was changed in the forward"):
            model(torch.tensor([1, 2]))

    on_ranks(1, train)


def test_the_weights_that_were_assigned_between_forwards_are_seen() -> None:
    def train(group: _C.Communicator) -> None:
        model = sharded(model_of("nothing"), group)
        step(model, 0)
        weight = model.module[0].module.weight
        home = weight.data
        weight.data = torch.ones(WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"^0\.weight\.data has been assigned"):
            model(torch.ones(1, WIDTH))
        weight.data = home
        step(model, 1)

    on_ranks(2, train)


def test_changes_that_units_make_themselves_are_none() -> None:
    """A loaded state, a copy, whole parameters that were written back, and NaNs."""

    def train(group: _C.Communicator) -> None:
        model = sharded(model_of("nothing"), group)
        step(model, 0)
        with model.summon_full_params():
            for param in model.parameters():
                param.data.mul_(0.5)
        step(model, 1)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        step(model, 2)
        step(copy.deepcopy(model), 3)
        step(model, 4, lr=float("nan"))
        step(model, 5)

    on_ranks(2, train)


def test_frozen_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    base = nn.Sequential(frozen, nn.Linear(WIDTH, WIDTH))
    x = torch.ones(1, WIDTH)
    expected = base(x)

    def train(group: _C.Communicator) -> None:
        model = FSDP(copy.deepcopy(base), process_group=group, on_neuron=False)
        out = model(x)
        assert torch.equal(out, expected)
        out.sum().backward()

    on_ranks(1, train)


def test_without_poison_the_first_forward_with_gradients_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CTRAINER_FSDP_POISON")

    def train(group: _C.Communicator) -> None:
        model = sharded(model_of("write_to_data"), group).eval()
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        model.train()
        with pytest.raises(RuntimeError, match=r"^0\.weight was changed"):
            model(torch.ones(1, WIDTH))

    on_ranks(1, train)
