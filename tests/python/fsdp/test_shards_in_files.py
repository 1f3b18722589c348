"""Shards in files: training is that of shards in memory to the bit, and what fails says
so and changes nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
from pathlib import Path
from typing import Any

import fsdp_scenarios as units
import pytest
import scenarios
import torch
from fsdp_scenarios import check_same, mse, nested, tree, wrap
from rank_threads import on_ranks, seeded
from ranks import run_alone
from torch import nn

from ctrainer import optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

PREFETCH: dict[str, Any] = {
    "forward_prefetch": True,
    "backward_prefetch": "BACKWARD_PRE",
}
# How units are, and the optimizer.
CASES: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    ({}, optim.AdamW, {}),
    ({"use_orig_params": True, "read_ahead": 1}, optim.AdamW, {}),
    ({"use_orig_params": True, **PREFETCH}, optim.Lion, {}),
    ({"flatten_parameters": False, "compute_dtype": "bfloat16"}, optim.SGD,
     {"momentum": 0.9}),
    ({"reshard_after_forward": False, "use_orig_params": True}, optim.AdamW, {}),
    ({"use_orig_params": True, "compute_dtype": "float16"}, optim.AdamW8bit, {}),
    ({"gather_bits": 8, "reduce_bits": 4, "use_orig_params": True}, optim.AdamW, {}),
    (PREFETCH, torch.optim.AdamW, {}),
]  # fmt: skip


def deep(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Parameters that neither begin nor end at pages."""
    with seeded(seed):
        layers = [nn.Linear(units.WIDTH, 70), *(nn.Linear(70, 70) for _ in range(5))]
        return nn.Sequential(*layers, nn.Linear(70, 4)).to(dtype)


def sharded(group: Any, folder: Any, dtype: Any = torch.float32, **options: Any) -> Any:
    model = deep(dtype=dtype)
    options = {"watch_released": False, "shard_folder": folder, **options}
    for i in range(1, 6):
        model[i] = wrap(group, model[i], **options)
    return wrap(group, model, **options)


def train(model: Any, optimizer: Any, group: Any, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                loss = mse(model, 2 * step + part, group)
                loss.backward()
            losses.append(loss.item())
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(norm))
    return losses


def check_equal(here: Any, there: Any) -> None:
    """Weights of all ranks, and this rank's state."""
    own, other = here[0].full_state_dict(), there[0].full_state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    states = [list(o.state_dict()["state"].values()) for o in (here[1], there[1])]
    for one, two in zip(*states, strict=True):
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two[name]))


def files_of(model: Any) -> list[Any]:
    """The files of the units, of which every shard is in its own."""
    for unit in model.units():
        begin = torch.frombuffer(unit._shard_file, dtype=torch.uint8).data_ptr()
        for shard in unit.sharded_params:
            assert 0 <= shard.data_ptr() - begin < unit._shard_file.nbytes
    return [unit._shard_file for unit in model.units()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_shards_in_files_give_the_same_bits_and_resume(case: int, world: int) -> None:
    options, make, given = CASES[case]

    def run(group: Any) -> None:
        def made(folder: Any) -> Any:
            model = sharded(group, folder, **options)
            return model, make(model.parameters(), lr=1e-2, **given)

        here, there, resumed = made(None), made("/tmp"), made("/tmp")
        assert train(*here, group, range(3)) == train(*there, group, range(3))
        check_equal(here, there)
        files_of(there[0])
        resumed[0].load_state_dict(copy.deepcopy(there[0].state_dict()))
        resumed[0].load_feedback_state_dict(there[0].feedback_state_dict())
        resumed[1].load_state_dict(copy.deepcopy(there[1].state_dict()))
        again = train(*here, group, range(3, 5))
        assert again == train(*resumed, group, range(3, 5))
        check_equal(here, resumed)
        files_of(resumed[0])

    on_ranks(world, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offloads_state", [False, True])
def test_shards_of_half_precision_with_master_weights_in_files(
    dtype: torch.dtype, offloads_state: bool
) -> None:
    def run(group: Any) -> None:
        def made(folder: Any) -> Any:
            model = sharded(group, folder, dtype, use_orig_params=True)
            made = optim.AdamW(model.parameters(), lr=1e-2, master_weights=True)
            if folder is not None and offloads_state:
                made.offload_state(folder)
            return model, made

        here, there = made(None), made("/tmp")
        with seeded(0):
            x = torch.randn(3, units.WIDTH).to(dtype)
        for _ in range(3):
            losses = []
            for model, optimizer in (here, there):
                loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        check_equal(here, there)

    on_ranks(2, run)


@pytest.mark.parametrize("world", [1, 2])
def test_training_from_files_equals_one_process_of_torch(world: int) -> None:
    def run(group: Any) -> None:
        plain = tree()
        options = {"shard_folder": "/tmp", **PREFETCH}
        check_same(group, nested(group, copy.deepcopy(plain), **options), plain)

    on_ranks(world, run)


@pytest.mark.exhaustive
def test_whatever_trains_from_memory_trains_from_files(tmp_path: Path) -> None:
    units.EVERYWHERE.update(shard_folder="/tmp")
    try:
        found = scenarios.outcomes(tmp_path, 2, "fsdp_scenarios")
    finally:
        units.EVERYWHERE.clear()
    assert [{n: t for n, t in rank.items() if t} for rank in found] == [{}, {}]


def alone(folder: Any, **options: Any) -> Any:
    layers = [FSDP(nn.Linear(80, 80), shard_folder=folder, **options) for _ in range(4)]
    return FSDP(nn.Sequential(*layers), shard_folder=folder, **options)


def step(model: Any, optimizer: Any = None) -> None:
    model(torch.ones(2, 80)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def test_units_are_read_ahead_in_the_order_of_the_last_pass() -> None:
    model = alone("/tmp", read_ahead=2)
    shards = [unit._shard_file.nbytes for unit in model.units() if unit._shard_file]
    held: list[int] = []
    full = [unit._unit.full.nbytes for unit in model.units()]
    for layer in model.module.module:
        layer.module.module.register_forward_hook(
            lambda *given: held.append(model._unit.live_bytes)
        )
    step(model)
    assert held == [full[1]] * 4  # nothing is known of the order
    held.clear()
    step(model)
    ahead = [2, 2, 1, 0]
    assert held == [full[1] + n * shards[0] for n in ahead]
    assert model._unit.live_bytes == 0


class Skips(nn.Module):
    """Runs the first `n` layers."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        with seeded(0):
            layers = [nn.Linear(80, 80) for _ in range(5)]
        self.layers = nn.ModuleList(FSDP(m, shard_folder=folder) for m in layers)

    def forward(self, x: torch.Tensor, n: int = 5) -> torch.Tensor:
        for layer in self.layers[:n]:
            x = layer(x)
        return x


def test_what_was_read_ahead_in_vain_is_read_again_after_a_change() -> None:
    def outputs(folder: Any) -> list[torch.Tensor]:
        model, found = FSDP(Skips(folder)), []
        for n, fails in ((5, False), (5, False), (2, False), (5, False), (5, True)):
            out = model(torch.ones(2, 80), n)
            if fails:  # in the middle of the backward
                hook = model.module.module.layers[3].module.module.bias
                handle = hook.register_hook(lambda grad: 1 / 0)
                out = model(torch.ones(2, 80), n)
                with contextlib.suppress(ZeroDivisionError):
                    out.sum().backward()
                handle.remove()
            else:
                out.sum().backward()
            assert model._unit.live_bytes == 0 or fails
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.125)
            found.append(out.detach())
        found.append(model(torch.ones(2, 80)).detach())
        return found

    for one, two in zip(outputs(None), outputs("/tmp"), strict=True):
        assert torch.equal(one, two)


def test_copies_and_assigned_states_are_in_files_too() -> None:
    model = alone("/tmp")
    before = files_of_units(model)
    again = copy.deepcopy(model)
    assert not set(map(id, files_of_units(again))) & set(map(id, before))
    state = {name: value + 1 for name, value in again.state_dict().items()}
    again.load_state_dict(state, assign=True)
    assert len(files_of_units(again)) == 4
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one + 1, two)
    optimizers = [optim.AdamW(m.parameters()) for m in (model, again)]
    for made, optimizer in zip((model, again), optimizers, strict=True):
        step(made, optimizer)
    files_of_units(again)
    plain = alone(None)
    plain.load_state_dict(state)
    step(plain, optim.AdamW(plain.parameters()))
    for one, two in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def files_of_units(model: Any) -> list[Any]:
    return [f for unit in model.units()[1:] for f in files_of(unit)]


def test_an_optimizer_that_looks_at_whole_parameters_is_rejected() -> None:
    model = alone("/tmp")
    with pytest.raises(
        ValueError, match=r"shards in a file are for .*element by eleme"
    ):
        step(model, optim.LAMB(model.parameters()))


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make the folder, or mount the drive"):
        alone(tmp_path / "missing")
    with pytest.raises(ValueError, match="read_ahead must be at least 1, got 0"):
        alone(tmp_path, read_ahead=0)


def test_a_full_disk_is_named_before_the_first_step(small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"cannot set aside \d+ bytes in .*room for all"):
        FSDP(nn.Linear(1200, 1200), shard_folder=small_disk)
    gc.collect()
    plain = nn.Linear(80, 80)
    here = FSDP(copy.deepcopy(plain))
    there = FSDP(plain, shard_folder=small_disk)
    for model in (here, there):
        step(model, optim.AdamW(model.parameters()))
    for one, two in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, two)


def test_files_have_no_names_and_end_with_the_module(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = alone(tmp_path)
    step(model, optim.AdamW(model.parameters()))
    assert len(os.listdir("/proc/self/fd")) == before + 4
    assert list(tmp_path.iterdir()) == []
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = run_alone("fsdp.killed_with_shards_in_files", str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "2 updates\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_is_an_error_of_the_next_pass_and_update() -> None:
    model = alone("/tmp")
    optimizer = optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model)
    os.ftruncate(model.units()[3]._shard_file.fileno(), 4096)
    first = next(model.parameters()).detach().clone()
    with pytest.raises(OSError, match=r"has been cut.*nothing is updated; resume"):
        optimizer.step()
    assert torch.equal(next(model.parameters()), first)
    with pytest.raises(OSError, match="has been cut"):
        step(model)
    assert model._unit.live_bytes == 0


def test_a_drive_that_fails_is_an_error_of_the_pass() -> None:
    model = alone("/tmp")
    step(model)
    file = model.units()[3]._shard_file
    blind = os.open("/tmp", os.O_TMPFILE | os.O_WRONLY)
    os.ftruncate(blind, file.nbytes)
    os.dup2(blind, file.fileno())  # reads fail from here on
    os.close(blind)
    with pytest.raises(OSError, match="cannot read the unnamed file in /tmp"):
        step(model)
    assert model._unit.live_bytes == 0


def test_a_forked_child_gathers_nothing_and_the_parent_goes_on() -> None:
    model = alone("/tmp")
    optimizer = optim.AdamW(model.parameters())
    step(model, optimizer)
    child = os.fork()
    if child == 0:
        try:
            model(torch.ones(2, 80))
        except RuntimeError as error:
            os._exit(0 if "process" in str(error) else 2)
        os._exit(1)
    _, ended = os.waitpid(child, 0)
    assert ended == 0
    step(model, optimizer)


def test_memory_that_shards_take_is_that_of_the_units_read_ahead() -> None:
    runs = [run_alone("fsdp.memory_of_shards", *folder) for folder in ((), ("/tmp",))]
    assert [run.returncode for run in runs] == [0, 0], runs
    in_memory, in_files = (int(run.stdout) for run in runs)
    layer = 4 * 1001 * 1000
    pieces = 4  # of a layer each
    assert in_memory - in_files >= (12 - pieces - 2) * layer, (in_memory, in_files)
