"""Tests of the host whose ranks are threads, on emulated GPUs: NCCL is beside torch's
stream, and what a test makes, or has made for its ranks, is there."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import any_gpu
import emulated_torch
import rank_threads
import scenarios
import torch
from torch import nn

from ctrainer import _C

LEFT_OUT = {
    "what_trains_without_trains_with_it": "ranks share its options",
    "changes_of_what_is_trained_are_logged": "ranks share a log",
    "a_module_may_go_while_something_is_begun": "torch's thread of a GPU has the error",
}
TESTS = str(Path(__file__).parents[1]) + os.sep


def on_ranks(
    world: int,
    work: Callable[[_C.Communicator], Any],
    group_seconds: float = 40.0,
) -> list[Any]:
    """rank_threads.on_ranks, a GPU for each rank; what it returns is on the host."""
    failures = [""] * world

    def be_rank(group: _C.Communicator, device: torch.device) -> Any:
        try:
            with any_gpu.TestsMakeTensorsOn(device):
                assert torch.ones(1).device == device
                return moved(moved(work, device)(group), torch.device("cpu"))
        except BaseException:
            failures[group.rank] = traceback.format_exc()
            return None

    with (
        mock.patch.object(emulated_torch.Module, "device_count", return_value=world),
        rank_threads.nothing_global_changes(),
    ):
        results = any_gpu.on_nccl_ranks(be_rank, world, group_seconds)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    assert not told, "\n".join(told)
    return results


def outcomes(folder: Path, world: int, *modules: str) -> list[dict[str, str]]:
    """scenarios.outcomes but of those LEFT_OUT; what one rank raises is all ranks'."""
    found = {}
    for name, scenario in scenarios.found_in(*modules).items():
        if name in LEFT_OUT:
            continue
        try:
            on_ranks(world, scenario)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    return [found] * world


def moved(value: Any, device: torch.device, seen: dict[int, Any] | None = None) -> Any:
    """The value with its tensors and modules on the device, those that a function of
    the tests has from around it among them. What has none is the same object."""
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = (value, value)  # for a function that calls itself
        seen[id(value)] = (_moved(value, device, seen), value)  # which keeps the id
    return seen[id(value)][0]


def _moved(value: Any, device: torch.device, seen: dict[int, Any]) -> Any:
    to = functools.partial(moved, device=device, seen=seen)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)._apply(lambda t: t if t.is_meta else t.to(device))
    if isinstance(value, torch.Tensor) and value.is_leaf and not value.is_meta:
        there = value.detach().to(device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(there, value.requires_grad)
        return there.requires_grad_(value.requires_grad)
    if isinstance(value, functools.partial):
        named = {name: to(it) for name, it in value.keywords.items()}
        return functools.partial(to(value.func), *map(to, value.args), **named)
    if type(value) in (list, tuple):
        items = [to(it) for it in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if type(value) in (dict, OrderedDict):
        named = type(value)((key, to(it)) for key, it in value.items())
        return value if all(named[key] is value[key] for key in value) else named
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **to(vars(value)))
    if not isinstance(value, types.FunctionType):
        return value
    if not value.__code__.co_filename.startswith(TESTS):
        return value
    cells = tuple(_cell(cell, to) for cell in value.__closure__ or ())
    made = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, to(value.__defaults__), cells
    )
    made.__kwdefaults__ = to(value.__kwdefaults__)
    return made


def _cell(cell: types.CellType, to: Callable[[Any], Any]) -> types.CellType:
    """The same cell, which others may fill or change, unless its value has tensors."""
    try:
        made = to(cell.cell_contents)
    except ValueError:
        return cell
    return cell if made is cell.cell_contents else types.CellType(made)
