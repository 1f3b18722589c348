"""fairscale's names, and torch's for optimizer states, on two ranks: in one run of
their processes for all scenarios."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import scenarios
import torch
from fairscale_scenarios import (
    scenario_apply_has_whole_parameters_and_keeps_what_is_changed,
)
from rank_threads import on_ranks
from torch import nn

from ctrainer.compat.fairscale import (
    FlattenParamsWrapper,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)

WORLD = 2
SCENARIOS = (
    "fairscale_scenarios",
    "fairscale_sharing_scenarios",
    "sharded_gradients_scenarios",
    "fsdp_state_scenarios",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("fairscale")
    return scenarios.outcomes(folder, WORLD, *SCENARIOS)


@pytest.mark.parametrize("name", scenarios.found_in(*SCENARIOS))
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * WORLD


def test_apply_on_one_rank() -> None:
    on_ranks(1, scenario_apply_has_whole_parameters_and_keeps_what_is_changed)


class Recorded(nn.Module):
    """What its forward was told in each of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((is_checkpointing(), is_recomputing()))
        return torch.tanh(self.layer(x))


def test_checkpointing_is_told_and_can_be_switched_off_in_a_thread() -> None:
    model = checkpoint_wrapper(Recorded())
    x = torch.ones(2, 3, requires_grad=True)

    def run() -> list[tuple[bool, bool]]:
        model.seen.clear()
        model(x).sum().backward()
        return list(model.seen)

    twice = [(True, False), (False, True)]
    assert run() == twice
    with disable_checkpointing():
        assert run() == [(False, False)]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(run).result() == twice
        with pytest.raises(ZeroDivisionError), disable_checkpointing():
            raise ZeroDivisionError
        assert run() == [(False, False)]
    assert run() == twice
    assert not is_checkpointing()
    assert not is_recomputing()


@pytest.mark.parametrize("names", [None, ["one", "two"]])
def test_flat_parameters_are_unflattened_once_and_loaded_by_their_names(
    names: list[str] | None,
) -> None:
    def flat(seed: int) -> FlattenParamsWrapper:
        torch.manual_seed(seed)
        first, second = nn.Linear(3, 2), nn.Linear(2, 2)
        model = nn.Sequential(first, second)
        lists = [list(first.parameters()), list(second.parameters())]
        return FlattenParamsWrapper(model, lists, flat_param_names=names)

    a, b = flat(0), flat(1)
    state = {name: value.clone() for name, value in a.state_dict().items()}
    with a.unflatten_params(), a.unflatten_params():
        assert a.state_dict().keys() == state.keys()
        assert sorted(n for n, _ in a.named_parameters()) == sorted(
            f"_fpw_module.{name}" for name in state
        )
        zeros = [torch.zeros_like(each) for each in a.flat_params]
        with a.unflatten_params(zeros):
            assert not any(value.any() for value in a.state_dict().values())
    assert [n for n, _ in a.named_parameters()] == a.flat_param_names
    for given in (a.flat_state_dict(), state):
        b.load_state_dict({name: value + 1 for name, value in given.items()})
        found = b.state_dict()
        assert all(torch.equal(found[name], value + 1) for name, value in state.items())
