"""fairscale's names, and torch's for optimizer states, on two ranks: in one run of
their processes for all scenarios."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    FullyShardedDataParallel,
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
    flat_names = [f"flat_param_{name}" for name in names or (0, 1)]
    assert [n for n, _ in a.named_parameters()] == flat_names == a.flat_param_names
    for given in (a.flat_state_dict(), state):
        b.load_state_dict({name: value + 1 for name, value in given.items()})
        found = b.state_dict()
        assert all(torch.equal(found[name], value + 1) for name, value in state.items())


class Place:
    """A process group as far as fairscale's own tests have one."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_a_process_group_may_have_a_rank_and_a_size_alone() -> None:
    plain = nn.Linear(3, 2)
    model = FullyShardedDataParallel(copy.deepcopy(plain), Place(0, 1))
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    (plain(torch.ones(1, 3)).sum() * 2).backward()
    expected = torch.cat([plain.weight.grad.view(-1), plain.bias.grad])
    assert torch.equal(model.params[0].grad, expected)
    whole = torch.cat([plain.weight.view(-1), plain.bias]).detach()
    other = FullyShardedDataParallel(plain, Place(1, 3))
    assert (other.rank, other.world_size) == (1, 3)
    assert torch.equal(other.params[0], whole[3:6])
    with pytest.raises(RuntimeError, match="on rank 1 of 3: process_group has rank"):
        other(torch.ones(1, 3))


def test_missing_parameters_are_left_out_of_consolidated_weights() -> None:
    """fairscale's format, written by hand: an expert of two ranks' own."""

    def unit(path: str, own: bool, *names: str) -> dict[str, Any]:
        flat = {"names": names, "shapes": [(2, 3), (2,)], "numels": [6, 2]}
        return {
            "fsdp_path": path,
            "params": {"flat_param_0": flat | {"padding": 0}},
            "no_broadcast_optim_state": own,
            "shared_param_info": [("weight", "tied")] if own else [],
        }

    units = [unit("", False, "a", "b"), unit("experts.0", True, "weight", "bias")]
    metadata = {"param_metadata": units, "buffer_names": ["missing"]}
    weights = [{"experts.0.flat_param_0": torch.arange(8.0) + r} for r in range(2)]
    consolidate = functools.partial(
        FullyShardedDataParallel.consolidate_shard_weights, weights, [metadata] * 2
    )
    found = consolidate(strict=False)
    assert {name: value.tolist() for name, value in found.items()} == {
        "experts.0.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "experts.0.tied": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "experts.0.bias": [6.0, 7.0],
    }
    with pytest.raises(ValueError, match="'flat_param_0' of the metadata is not in"):
        consolidate()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_of_half_precision_is_wrapped(dtype: torch.dtype, flat: bool) -> None:
    plain = nn.Linear(3, 2).to(dtype)
    model = FullyShardedDataParallel(
        copy.deepcopy(plain), compute_dtype=dtype, flatten_parameters=flat
    )
    assert {name: v.dtype for name, v in model.state_dict().items()} == {
        "weight": dtype, "bias": dtype
    }  # fmt: skip
    x = torch.rand(4, 3)
    for module in (model, plain):
        module(x.to(dtype)).float().square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.25).step()
    state = model.state_dict()
    for name, param in plain.named_parameters():
        assert torch.equal(state[name], param), name
        with model.summon_full_params():
            assert torch.equal(dict(model.named_parameters())[name], param)
    model.load_state_dict(plain.state_dict())
    assert all(
        torch.equal(model.state_dict()[n], v) for n, v in plain.state_dict().items()
    )
    with pytest.raises(TypeError, match=r"weight is torch\.float64; trained"):
        FullyShardedDataParallel(nn.Linear(3, 2).double())
