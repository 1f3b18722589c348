"""Optimizers whose state is in a file: as those of state in memory, and what fails."""

from __future__ import annotations

import copy
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_alone

import ctrainer.optim as optim
from ctrainer._C import DiskMemory
from ctrainer.optim import _disk

SIZES = [(40, 701), (1501,), (0,), (3,)]  # of 64 KiB and more is the first alone

ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"amsgrad": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {}),
    "AdEMAMix": (optim.AdEMAMix, {}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "plain SGD": (optim.SGD, {}),
    "Lion": (optim.Lion, {}),
    "schedule-free": (optim.AdamWScheduleFree, {}),
    "8 bit": (optim.AdamW8bit, {"min_8bit_size": 0}),
    "compact": (optim.AdamWCompact, {"master_weight_bits": 24}),
    "master": (optim.AdamW, {"master_weights": True}),
    "stochastic": (optim.AdamW, {"stochastic_rounding": True, "fp32_state": True}),
}


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_disk, "_LEAST", 1)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def steps(optimizer: Any, seeds: range) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    for seed in seeds:
        torch.manual_seed(seed)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        optimizer.step(max_norm=1.0)


def tensors(optimizer: Any) -> list[torch.Tensor]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    states = [s for p in own for s in optimizer.state[p].values()]
    return [t.detach() for t in (*own, *states) if isinstance(t, torch.Tensor)]


def check_equal(one: Any, other: Any) -> None:
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def in_file(optimizer: Any) -> int:
    """Bytes of the optimizer's state that are in its file."""
    memory = optimizer._disk_state.memory
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return sum(
        t.nbytes
        for t in tensors(optimizer)
        if begin <= t.data_ptr() < begin + memory.nbytes
    )


def made(name: str, dtype: torch.dtype) -> Any:
    cls, options = ELEMENTWISE[name]
    return cls(parameters(dtype), lr=1e-2, **options)


@settings(max_examples=draws(10, 300), deadline=None)
@given(
    name=st.sampled_from(list(ELEMENTWISE)), half=st.booleans(),
    begin=st.integers(0, 2), buffers=st.integers(1, 4), loads=st.booleans(),
)  # fmt: skip
def test_state_in_a_file_gives_the_same_bits(
    name: str, half: bool, begin: int, buffers: int, loads: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    here, there = made(name, dtype), made(name, dtype)
    steps(here, range(begin))
    steps(there, range(begin))
    there.offload_state("/tmp", buffers=buffers)
    steps(here, range(begin, 4))
    steps(there, range(begin, 4))
    check_equal(here, there)
    if loads:  # each loads what the other saved
        saved, own = copy.deepcopy(there.state_dict()), here.state_dict()
        there.load_state_dict(copy.deepcopy(own))
        here.load_state_dict(saved)
        steps(here, range(4, 6))
        steps(there, range(4, 6))
        check_equal(here, there)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_optimizer_s_state_is_in_the_file(name: str) -> None:
    half = name in ("master", "stochastic")
    optimizer = made(name, torch.bfloat16 if half else torch.float32)
    optimizer.offload_state("/tmp")
    if name == "plain SGD":
        assert optimizer._disk_state.memory is None
        return
    steps(optimizer, range(1))
    numel = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    like = [
        t
        for p in optimizer.param_groups[0]["params"]
        for t in optimizer.state[p].values()
        if isinstance(t, torch.Tensor) and t.shape == p.shape
    ]
    assert in_file(optimizer) == sum(t.nbytes for t in like) >= numel


@pytest.mark.parametrize("name", ["8 bit", "compact", "stochastic"])
def test_scales_and_random_bits_are_those_of_a_piece_s_elements(name: str) -> None:
    def trained(offloads: bool) -> Any:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn((1 << 20) + 1001).bfloat16())
        cls, options = ELEMENTWISE[name]
        optimizer = cls([p], lr=1e-2, **options)
        if offloads:
            optimizer.offload_state("/tmp")
        steps(optimizer, range(2))
        return optimizer

    check_equal(trained(False), trained(True))


def test_small_tensors_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    optimizer = made("Adam", torch.float32)
    optimizer.offload_state("/tmp")
    steps(optimizer, range(1))
    assert in_file(optimizer) == 2 * 4 * 40 * 701


def test_parameters_in_another_order_of_memory_keep_it() -> None:
    def trained(offloads: bool) -> Any:
        torch.manual_seed(0)
        p = torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last)
        optimizer = optim.AdamW([torch.nn.Parameter(p)])
        if offloads:
            optimizer.offload_state("/tmp")
        steps(optimizer, range(2))
        return optimizer

    check_equal(trained(False), trained(True))


def test_a_new_group_s_state_is_in_the_file_too() -> None:
    here, there = made("AdamW", torch.float32), made("AdamW", torch.float32)
    there.offload_state("/tmp")
    for optimizer in (here, there):
        steps(optimizer, range(1))
        torch.manual_seed(1)
        new = torch.nn.Parameter(torch.randn(5000))
        optimizer.add_param_group({"params": [new], "lr": 0.1})
        steps(optimizer, range(1, 3))
    check_equal(here, there)
    like = sum(p.numel() for g in there.param_groups for p in g["params"])
    assert in_file(there) == 4 * 3 * like


def test_a_copy_of_the_optimizer_has_its_state_in_memory() -> None:
    optimizer = made("AdamW", torch.float32)
    optimizer.offload_state("/tmp")
    steps(optimizer, range(2))
    again = copy.deepcopy(optimizer)
    check_equal(optimizer, again)
    for one in (optimizer, again):
        steps(one, range(2, 4))
    check_equal(optimizer, again)
    assert again._disk_state is None


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: optim.LAMB(p), "lamb looks at whole parameters"),
        (lambda p: optim.Adafactor(p), "adafactor"),
        (lambda p: optim.Composite([{"params": p[:1], "optimizer": optim.Muon}]),
         "muon looks at"),
        (lambda p: optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))]),
         "a parameter is on meta.*cpu_offload=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_in_a_file_is_rejected(make: Any, named: str) -> None:
    optimizer = make(parameters())
    with pytest.raises(ValueError, match=named):
        optimizer.offload_state("/tmp")
    assert optimizer._disk_state is None


def test_a_folder_that_is_missing_or_no_folder_is_named(tmp_path: Path) -> None:
    optimizer = made("AdamW", torch.float32)
    with pytest.raises(FileNotFoundError, match="make the folder, or mount the drive"):
        optimizer.offload_state(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="make the folder"):
        optimizer.offload_state(tmp_path / "file")
    with pytest.raises(ValueError, match="buffers must be at least 1, got 0"):
        optimizer.offload_state(tmp_path, buffers=0)
    with pytest.raises(ValueError, match="nbytes must be above 0"):
        DiskMemory(0, tmp_path)
    steps(optimizer, range(1))


def test_a_full_disk_is_named_before_the_first_update(small_disk: Path) -> None:
    here, there = made("AdamW", torch.float32), made("AdamW", torch.float32)
    steps(here, range(1))
    steps(there, range(1))
    filled = DiskMemory(31 << 17, small_disk)
    with pytest.raises(OSError, match=r"cannot set aside \d+ bytes in .*room for all"):
        there.offload_state(small_disk)
    assert there._disk_state is None
    steps(here, range(1, 3))
    steps(there, range(1, 3))
    check_equal(here, there)
    del filled
    there.offload_state(small_disk)
    steps(here, range(3, 5))
    steps(there, range(3, 5))
    check_equal(here, there)
    del there


def test_runs_in_one_folder_do_not_meet_and_leave_nothing(tmp_path: Path) -> None:
    one, other = made("AdamW", torch.float32), made("SGD", torch.float32)
    one.offload_state(tmp_path)
    other.offload_state(tmp_path)
    alone = made("AdamW", torch.float32)
    for optimizer in (one, other, alone):
        steps(optimizer, range(2))
    check_equal(one, alone)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = run_alone("optim.killed_with_state_in_a_file", str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "2 updates\n"
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_cannot_update_and_the_parent_goes_on() -> None:
    optimizer = made("AdamW", torch.float32)
    optimizer.offload_state("/tmp")
    alone = made("AdamW", torch.float32)
    steps(alone, range(3))
    steps(optimizer, range(1))
    child = os.fork()
    if child == 0:
        try:
            steps(optimizer, range(1, 2))
        except RuntimeError as error:
            os._exit(0 if "belongs to process" in str(error) else 2)
        os._exit(1)
    _, ended = os.waitpid(child, 0)
    assert ended == 0
    steps(optimizer, range(1, 3))
    check_equal(optimizer, alone)


def test_a_file_that_was_cut_is_an_error_before_anything_changes() -> None:
    optimizer = made("AdamW", torch.float32)
    optimizer.offload_state("/tmp")
    steps(optimizer, range(1))
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    os.ftruncate(optimizer._disk_state.memory.fileno(), 4096)
    with pytest.raises(OSError, match=r"has been cut.*nothing is updated; resume"):
        steps(optimizer, range(1, 2))
    for p, old in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert torch.equal(p, old)


def test_the_file_ends_with_the_optimizer(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = open_files()
    optimizer = made("AdamW", torch.float32)
    optimizer.offload_state(tmp_path)
    steps(optimizer, range(1))
    assert open_files() == before + 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, range(1))
    gc.collect()
    assert open_files() == before + 1
    del optimizer
    gc.collect()
    assert open_files() == before


def test_memory_that_state_takes_is_that_of_the_pieces() -> None:
    done = run_alone("optim.memory_of_state")
    assert done.returncode == 0, done.stderr
    in_memory, in_a_file = map(int, done.stdout.split())
    state = 2 * 4 * 10_000_000
    pieces = 4 * 2 * 4 * 1_000_000
    of_a_parameter = 2 * 4 * 1_000_000  # as it is made
    assert in_memory >= state
    assert in_a_file <= pieces + of_a_parameter + (8 << 20)
