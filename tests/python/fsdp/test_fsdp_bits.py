"""Muon and optimizers with 8-bit state, of shards cut on blocks: parameters and state
have the bits of one process, on any number of ranks.

Gradients are the same numbers on every rank, of so few bits that a sum over the ranks
is exact in bfloat16, too, and its average is the number again.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import draws
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import load_shard, reshard_checkpoints, save_shard
from ctrainer.fsdp.shard_files import check_metadata

STEPS = 3
Shapes = list[tuple[int, ...]]


def numbers(name: str, shape: torch.Size, step: int, most: int) -> torch.Tensor:
    """Multiples of 1/64; of 255 at most, a sum of three has 8 bits."""
    seed = zlib.crc32(f"{name} {step}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator) / 64


class Dot(nn.Module):
    """A sum of its parameters times numbers, which are the gradients."""

    def __init__(self, name: str, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.name = name
        self.params = nn.ParameterList(params)

    def forward(self, step: int) -> torch.Tensor:
        products = [
            (p.float() * numbers(f"{self.name}.{i}", p.shape, step, 85)).sum()
            for i, p in enumerate(self.params)
        ]
        return torch.stack(products).sum()


class Sum(Dot):
    def __init__(self, below: list[Dot], params: list[nn.Parameter]) -> None:
        super().__init__("root", params)
        self.below = nn.ModuleList(below)

    def forward(self, step: int) -> torch.Tensor:
        return super().forward(step) + sum(unit(step) for unit in self.below)


def drawn(seed: int, matrices: bool) -> Sum:
    """Of a few units, odd shapes, two dtypes and frozen parameters; one of each unit is
    long enough for 8 bits, of which parts are not."""
    chance = random.Random(seed)
    extents = [1, 2, 7, 31, 64, 97]

    def params(unit: int) -> list[nn.Parameter]:
        made = []
        for number in range(chance.randint(1, 4)):
            shape: tuple[int, ...] = chance.choice(extents), chance.choice(extents)
            if number == 0:
                shape = chance.choice([(97, 64), (31, 97), (79, 79)])
            elif not matrices and chance.random() < 0.4:
                shape = (chance.choice([*extents, 255, 256, 257, 2500]),)
            dtype = chance.choice([torch.float32, torch.float32, torch.bfloat16])
            value = numbers(f"{unit}.{number}", torch.Size(shape), -1, 127).to(dtype)
            trains = number == 0 or chance.random() < 0.8
            made.append(nn.Parameter(value, requires_grad=trains))
        return made

    below = [Dot(f"unit {unit}", params(unit)) for unit in range(chance.randint(1, 3))]
    return Sum(below, params(-1))


def sharded(model: Sum, group: _C.Communicator, layout: dict[str, Any]) -> FSDP:
    options = {"process_group": group, "on_neuron": False, **layout}
    for i, unit in enumerate(model.below):
        model.below[i] = FSDP(unit, **options)
    return FSDP(model, **options)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}


def same(found: Any, expected: Any) -> bool:
    """Of the same dtype, shape and bits, NaN among them."""
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    bits = [t.detach().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return torch.equal(*bits)


def check(model: FSDP, optimizer: Any, whole: nn.Module, expected: Any) -> None:
    values = model.full_state_dict()
    for name, value in whole.state_dict().items():
        assert same(values[name], value), name
    state = FSDP.optim_state_dict(model, optimizer)["state"]
    for name, own in expected.items():
        assert state.get(name, {}).keys() == own.keys(), name
        for key, value in own.items():
            assert same(state[name][key], value), (name, key)


Maker = Callable[[nn.Module], Any]
VIEWS: dict[str, Any] = {"flatten_parameters": True, "use_orig_params": True}


def saved(model: FSDP, optimizer: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": FSDP.sharded_optim_state_dict(model, optimizer),
        "shard_metadata": model.get_shard_metadata(),
    }


def check_everywhere(
    plain: Sum, made: Maker, layout: dict[str, Any], folder: Path
) -> None:
    """Trained by 1 to 4 ranks, and by other ranks on: from the full state in memory, or
    from files."""
    whole = copy.deepcopy(plain)
    optimizer = made(whole)
    train(whole, optimizer, 0, STEPS)
    expected = whole_state(whole, optimizer)

    def begin(group: _C.Communicator) -> Any:
        model = sharded(copies[group.rank], group, layout)
        own = made(model)
        train(model, own, 0, STEPS)
        check(model, own, whole, expected)
        path = folder / f"{group.world_size}-rank-{group.rank}.safetensors"
        save_shard(saved(model, own), path)
        return model.full_state_dict(), FSDP.optim_state_dict(model, own)

    def resume(group: _C.Communicator, files: str) -> None:
        model = sharded(copies[group.rank], group, layout)
        own = made(model)
        if files:
            content = load_shard(files.format(group.rank))
            model.load_state_dict(content["model"])
            state = content["optimizer"]
        else:
            model.load_full_state_dict(full[0])
            state = FSDP.shard_full_optim_state_dict(full[1], model, optim=own)
        own.load_state_dict(state)
        train(model, own, STEPS, 1)
        check(model, own, whole, expected)

    for world in (1, 2, 3, 4):
        copies = [copy.deepcopy(plain) for _ in range(world)]
        full = on_ranks(world, begin)[0]
    train(whole, optimizer, STEPS, 1)
    expected = whole_state(whole, optimizer)
    reshard_checkpoints(
        f"{folder}/4", "-rank-?.safetensors", world_size=3, save_prefix=f"{folder}/new"
    )
    for world, files in ((2, ""), (3, f"{folder}/new-rank-{{}}-of-3.safetensors")):
        copies = [copy.deepcopy(plain) for _ in range(world)]
        on_ranks(world, partial(resume, files=files))


@pytest.mark.parametrize("seed", range(draws(1, 40)))
@pytest.mark.parametrize(
    "layout",
    [
        VIEWS | {"_shard_size_multiple": 1},
        VIEWS | {"flatten_parameters": False, "shard_param_on_dim_0": True},
        {"flatten_parameters": False, "_shard_size_multiple": 3},
    ],
    ids=["views", "views by rows", "shards"],
)
def test_muon_updates_shards_as_one_process_does(
    layout: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    def made(model: nn.Module) -> Any:
        return optim.Muon(model.parameters(), lr=0.02)

    check_everywhere(drawn(seed, matrices=True), made, layout, tmp_path)


EIGHT_BIT: dict[str, Callable[..., Any]] = {
    "AdamW8bit": optim.AdamW8bit,
    "Adam8bit": optim.Adam8bit,
    "Lion8bit": optim.Lion8bit,
    "AdEMAMix8bit": optim.AdEMAMix8bit,
    "AdamWCompact": optim.AdamWCompact,
    "LionCompact": optim.LionCompact,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "views": VIEWS | {"block_size": 256},
    "shards": {"flatten_parameters": False, "block_size": 256},
}


@pytest.mark.parametrize("seed", range(draws(1, 20)))
@pytest.mark.parametrize("layout", BLOCKS)
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_8_bit_state_of_shards_cut_on_blocks_is_that_of_one_process(
    name: str, layout: str, seed: int, tmp_path: Path
) -> None:
    def made(model: nn.Module) -> Any:
        options = {} if "Compact" in name else {"min_8bit_size": 2400}
        return EIGHT_BIT[name](model.parameters(), lr=1e-2, **options)

    check_everywhere(drawn(seed, matrices=False), made, BLOCKS[layout], tmp_path)


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_blocks_of_a_flat_parameter_are_those_of_its_parameters(
    name: str, tmp_path: Path
) -> None:
    """Which has 8-bit state of all, of short ones as well."""

    def made(model: nn.Module) -> Any:
        options = {} if "Compact" in name else {"min_8bit_size": 0}
        return EIGHT_BIT[name](model.parameters(), lr=1e-2, **options)

    plain = drawn(3, matrices=False)
    plain.requires_grad_(True)
    layout = {"flatten_parameters": True, "block_size": 256}
    check_everywhere(plain, made, layout, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be 1 or more elements or None, not 0"),
        ({"block_size": 2.0}, "block_size must be 1 or more elements or None"),
        ({"block_size": 8, "on_neuron": True}, "cuts them between rows"),
        ({"block_size": 8, "shard_param_on_dim_0": True}, "cuts them between rows"),
    ],
)
def test_a_block_size_that_nothing_can_be_cut_by_is_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP(nn.Linear(4, 4), **{"on_neuron": False, **options})


def test_units_below_are_cut_alike_and_files_say_so() -> None:
    model = FSDP(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        flatten_parameters=True,
        on_neuron=False,
        block_size=6,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
    )
    places = [[e.at for e in unit._groups[0].entries] for unit in model.units()[1:]]
    assert places == [[0, 12], [0, 12]]
    metadata = model.get_shard_metadata()
    assert (metadata["block_size"], metadata["shard_size_multiple"]) == (6, 384)
    check_metadata("a file", metadata)
    with pytest.raises(ValueError, match="a file: its shard_metadata has block_size 0"):
        check_metadata("a file", metadata | {"block_size": 0})
