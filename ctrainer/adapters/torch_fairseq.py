"""torch: what fairseq's Trainer needs of it."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ctrainer import _C
from ctrainer.adapters.generators import rng_state, set_rng_state
from ctrainer.adapters.torch import devices_elsewhere, empty_cache, no_grad
from ctrainer.checkpoint.files import expected_of, is_there
from ctrainer.checkpoint.torch_files import (
    FILE_LIMIT,
    archive_records,
    load_plain,
    numpy_names,
)
from ctrainer.runtime.torch_process import accelerator

__all__ = ["devices_elsewhere", "empty_cache", "no_grad", "rng_state", "set_rng_state"]

Module = nn.Module


def choose_device(cpu: bool) -> torch.device:
    """torch's accelerator, its current one, where there is one and the CPU is not asked
    for."""
    return (None if cpu else accelerator()) or torch.device("cpu")


def seed(value: int) -> None:
    """Seed the generators of the host and, where there are any, of GPUs.

    As torch.manual_seed, which also formats tracebacks for devices that are not there:
    200 microseconds.

    Args:
        value (int): The seed.
    """
    torch.default_generator.manual_seed(value)
    kind = accelerator()
    if kind is not None:
        torch.get_device_module(kind).manual_seed_all(value)


def autocast(module: Module, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for the device of a module; without `enabled` no context."""
    if not enabled:
        return contextlib.nullcontext()
    device = next((p.device.type for p in module.parameters()), "cpu")
    return torch.autocast(device)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device="cpu")


def is_idle_within(seconds: float) -> bool:
    """Whether the accelerator's current stream has done its work within a time."""
    stream, end = torch.accelerator.current_stream(), time.monotonic() + seconds
    while not stream.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def is_on_gpu(value: Any) -> bool:
    """Whether a value is a tensor of one number, in the memory of a GPU."""
    there = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return there and value.numel() == 1 and not value.is_complex()


def totals_of(rows: list[list[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """The sum of each row of numbers, which all have as many, in float64."""
    numbers = [number.detach().double().reshape(()) for row in rows for number in row]
    if not numbers:
        return torch.zeros(len(rows), dtype=torch.float64, device=device)
    return torch.stack(numbers).view(len(rows), -1).sum(1)


# Modules


def has_parameters(module: Any) -> bool:
    """Return whether a module has parameters.

    Args:
        module: The module.
    """
    return any(True for _ in module.parameters())


def trainable(*modules: Module) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def cast(module: Module, fp16: bool, bf16: bool) -> Module:
    """The module in the precision of the run, in place."""
    if fp16:
        return module.half()
    return module.to(torch.bfloat16) if bf16 else module


def shared_parameters(module: Module) -> list[list[str]]:
    """The paths of each parameter that is found at more than one."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(parameter, []).append(path)
    return [found for found in paths.values() if len(found) > 1]


def tie(module: Module, first: str, other: str) -> None:
    """Make the parameter at the path `other` that at the path `first`."""
    owner, _, name = other.rpartition(".")
    setattr(module.get_submodule(owner), name, module.get_parameter(first))


# Samples


def convert_sample(
    sample: Any, dtype: torch.dtype | None, device: torch.device, early: bool
) -> Any:
    """A nested sample on `device`, its float32 tensors in `dtype` (None: as they are).

    early: convert before the copy to the device, which then has half the bytes.
    """
    if isinstance(sample, torch.Tensor):
        wanted = dtype if sample.dtype == torch.float32 else None
        if early and wanted is not None:
            sample = sample.to(wanted)
        sample = sample.to(device, non_blocking=True)
        return sample if wanted is None else sample.to(wanted)
    if isinstance(sample, dict):
        pairs = {k: convert_sample(v, dtype, device, early) for k, v in sample.items()}
        return type(sample)(pairs)
    if isinstance(sample, list | tuple | set):
        values = [convert_sample(v, dtype, device, early) for v in sample]
        named = isinstance(sample, tuple) and hasattr(sample, "_fields")
        return type(sample)(*values) if named else type(sample)(values)
    return sample


def sample_dtype(fp16: bool, bf16: bool) -> torch.dtype | None:
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else None


# Gradients in a device's memory


def grad_norm(groups: list[dict[str, Any]]) -> torch.Tensor:
    """The norm of all gradients, computed where they are."""
    return nn.utils.get_total_norm(_grads(groups))


def divide_grads(groups: list[dict[str, Any]], by: float) -> None:
    grads = _grads(groups)
    if grads:
        torch._foreach_div_(grads, by)


def _grads(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [p.grad for g in groups for p in g["params"] if p.grad is not None]


def memory_gb() -> float | None:
    """GiB of the GPU that were never in use since the last call; None of a device other
    than CUDA's."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    used = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return float(total - used) / 2**30


def memory_summaries() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.memory_summary(i) for i in range(torch.cuda.device_count())]


# Checkpoints


def save_file(path: str, state: Any) -> None:
    """Write a file that torch.load reads, whole or not at all."""
    _C.write_archive(path, archive_records(path, to_host(state)))


def file_to_save(path: str, state: Any) -> Callable[[], None]:
    """A function that writes the file as save_file() does, with the values of now."""
    records = [
        (name, data.clone() if isinstance(data, torch.Tensor) else data)
        for name, data in archive_records(path, to_host(state))
    ]
    return lambda: _C.write_archive(path, records)


def load_file(path: str) -> Any:
    """Read a checkpoint onto the host, each byte checked, executing nothing that it may
    contain.

    Raises OSError or ValueError, which name the file, where it cannot be read, is
    damaged, or holds objects that are no plain data.
    """
    return load_plain(path, expected_of(path), _safe())


class _MeterOf2019:
    """A meter in a checkpoint of fairseq 0.9, whose "train_meters" are objects; its
    numbers are not restored."""


_OLD_METERS = [
    (_MeterOf2019, f"fairseq.meters.{name}")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


def _safe() -> list[Any]:
    return [argparse.Namespace, *_OLD_METERS, *numpy_names()]


def read_bytes(path: str) -> tuple[bytes, str]:
    """The bytes of a file, none where it is missing, and what kept it from being
    read."""
    try:
        if not is_there(path):
            return b"", ""
        data = _C.read_file(path, FILE_LIMIT, expected_of(path))
        return data, "" if data else f"{path}: is empty"
    except (OSError, ValueError) as error:
        return b"", str(error)


def to_bytes(value: Any) -> bytes:
    """Plain data, tensors and arrays included, as from_bytes reads it."""
    buffer = io.BytesIO()
    torch.save(to_host(value), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, name: str) -> Any:
    """The value of to_bytes() or of a checkpoint's file; runs nothing it may contain.

    Raises ValueError, with the name, where it holds objects that are no plain data.
    """
    return load_plain(name, None, _safe(), data)


def allow_namespaces() -> None:
    """Let torch.load(), which from 2.6 on makes plain data alone, make what fairseq's
    checkpoints hold of before its configs: an argparse.Namespace."""
    torch.serialization.add_safe_globals([argparse.Namespace])


def to_host(value: Any) -> Any:
    """Return a nested value with its tensors on the host and detached, not copied
    there.

    Args:
        value: Tensors, dicts, lists and tuples, nested as you like.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: to_host(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_host(v) for v in value]
    return tuple(map(to_host, value)) if type(value) is tuple else value


def load_weights(module: Any, state: dict[str, Any], cfg: Any) -> None:
    """module.load_state_dict, strictly, with model_cfg where it takes that."""
    takes = inspect.signature(module.load_state_dict).parameters
    more = {"model_cfg": cfg} if "model_cfg" in takes else {}
    module.load_state_dict(state, strict=True, **more)


def flat_state(state: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """An optimizer's state as if its parameters were one: fairseq's layout of fp16."""
    entries = state["state"]
    if len(entries) != len(sizes):
        return state  # parameters without gradients so far have no state to join
    joined: dict[str, Any] = {}
    for name, value in entries[0].items():
        joined[name] = value
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            joined[name] = torch.cat([entries[i][name].flatten() for i in entries])
    (group,) = state["param_groups"]
    return {"state": {0: joined}, "param_groups": [{**group, "params": [0]}]}


def unflatten_state(state: dict[str, Any], shapes: list[Any]) -> dict[str, Any]:
    """The reverse; a state that is not flat is returned as it is."""
    (group,) = state["param_groups"]
    total = sum(shape.numel() for shape in shapes)
    first = state["state"].get(0, {})
    flat = [v for v in first.values() if isinstance(v, torch.Tensor) and v.dim() == 1]
    if len(group["params"]) != 1 or not flat or flat[0].numel() != total:
        return state
    entries: dict[int, dict[str, Any]] = {i: {} for i in range(len(shapes))}
    for name, value in first.items():
        parts: list[Any] = [value] * len(shapes)
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            cut = torch.split(value, [shape.numel() for shape in shapes])
            parts = [part.view(s) for part, s in zip(cut, shapes, strict=True)]
        for i, part in enumerate(parts):
            entries[i][name] = part
    groups = [{**group, "params": list(range(len(shapes)))}]
    return {"state": entries, "param_groups": groups}


# Averages


class Stateful(Protocol):
    """An object with a state_dict() as modules have it."""

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...


def _is_averaged(name: str, value: torch.Tensor) -> bool:
    return value.is_floating_point() and "version" not in name


def averaged_tensors(module: Stateful) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors of a state_dict() that are averaged, each tensor once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if _is_averaged(name, value):
            found.setdefault(value.data_ptr(), (name, value))
    return [n for n, _ in found.values()], [v for _, v in found.values()]


def floats_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict() that are averaged."""
    return {name: value for name, value in state.items() if _is_averaged(name, value)}


def tensors_named(module: Stateful, names: list[str]) -> list[torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return [state[name] for name in names]


def float32_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, torch.float32, copy=True)


@torch.no_grad()
def copy_others(
    module: Stateful, source: Stateful, float32: dict[str, torch.Tensor]
) -> None:
    """Copy float32 averages into their module, and from the source what is not
    averaged."""
    others = source.state_dict()
    for name, value in module.state_dict().items():
        if name in float32:
            value.copy_(float32[name])
        elif not _is_averaged(name, value):
            value.copy_(others[name])


class OneGroup(torch.optim.Optimizer):
    """One parameter group of an optimizer, as an optimizer for a schedule."""

    def __init__(self, whole: Any, index: int) -> None:
        self._whole = whole
        self._index = index

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The group alone, live."""
        return [self._whole.param_groups[self._index]]

    def get_lr(self) -> Any:
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        self.param_groups[0]["lr"] = lr
