"""A GPU that torch's build for the CPU trains on: the plugin over the emulation, and a
device of torch, "emul", in the same memory. The host can touch it in copies alone."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import emulated_cuda
import torch

FOLDER = emulated_cuda.FOLDER / "torch"


class Stream:
    """torch.emul.Stream; its address has the name that CUDA's has."""

    def __init__(self) -> None:
        self._stream = torch.Stream(torch.device("emul", Module.current_device()))
        self.cuda_stream = self._stream.native_handle


class Module(types.ModuleType):
    """torch.emul, of what torch asks a device's module for."""

    Stream = Stream
    device = staticmethod(lambda device: contextlib.nullcontext())
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    # A rank's process has a device for each rank.
    device_count = staticmethod(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    current_device = staticmethod(lambda: torch.accelerator.current_device_index())
    set_device = staticmethod(torch.accelerator.set_device_index)
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


_applying: list[torch.nn.Module] = []  # by any thread, one within another
_counting = threading.Lock()


def _apply(
    module: torch.nn.Module, *args: Any, apply: Any = torch.nn.Module._apply, **k: Any
) -> torch.nn.Module:
    """As with CUDA, module.to(device) keeps the parameters that an optimizer has, and
    the attributes that they have."""
    parameters = list(module.parameters())
    attributes = [dict(vars(parameter)) for parameter in parameters]
    for parameter in parameters:
        _left.pop(id(parameter), None)  # none is elsewhere any more
    with _counting:
        _applying.append(module)
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return apply(module, *args, **k)
    finally:
        with _counting:
            _applying.pop()
            torch.__future__.set_swap_module_params_on_conversion(bool(_applying))
        for parameter, its in zip(parameters, attributes, strict=True):
            vars(parameter).update(its)


_DATA: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]
# By the id of a tensor that is elsewhere: the tensor, and its own memory.
_left: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """As with CUDA, `tensor.data` may be assigned a tensor of the host, and then one of
    the device again, and keeps its gradient and hooks."""
    swap = torch._C._swap_tensor_impl
    of, own = _left.get(id(tensor), (lambda: None, tensor))
    if of() is not tensor:  # or of an earlier one, which is gone
        own = tensor
    if own.device == value.device != tensor.device:
        swap(tensor, own)
        del _left[id(tensor)]
    elif {tensor.device.type, value.device.type} == {"cpu", "emul"}:
        other = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            other = torch.nn.Parameter(other, tensor.requires_grad)
        hooks: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
        swap(tensor, other)
        if tensor.device.type == "cpu":  # else it is moved, and stays
            _left[id(tensor)] = weakref.ref(tensor), other
        if hooks is not None:
            tensor._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
            tensor._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
        return
    _DATA.__set__(tensor, value)


class _Data(property):
    __name__ = "data"  # which subclasses of Tensor see


@functools.cache
def device() -> torch.device:
    """The first of four devices, made once a process; `ctrainer._cuda` is their plugin
    from then on, and a Trainer trains there. Needs a process without the other
    emulation."""
    assert "_cuda" not in emulated_cuda.LOADED, "run pytest tests/device by itself"
    module = emulated_cuda.load("cuda-emul-torch", FOLDER / "_cuda.so")
    sys.modules["ctrainer._cuda"] = module
    _library()
    ctypes.CDLL(str(FOLDER / "_cuda.so")).emul_set_devices(4)
    torch.utils.rename_privateuse1_backend("emul")
    torch._register_device_module("emul", Module("torch.emul"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    torch.nn.Module._apply = _apply
    torch.Tensor.data = _Data(_DATA.__get__, _set_data)
    # Torch's thread of a device's backward passes gives Python's objects back after the
    # pass. A process that ends in between is aborted; on the host no thread does this.
    atexit.register(time.sleep, 0.1)
    return torch.device("emul", 0)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(FOLDER / "libdevice.so"))
    library.emul_torchs_stream.restype = library.emul_last_stream.restype = (
        ctypes.c_void_p
    )
    library.emul_allocations_of_ours.restype = ctypes.c_size_t
    library.emul_waits.restype = library.emul_launches.restype = ctypes.c_size_t
    return library


def allocations() -> int:
    """How often the plugin has taken memory so far."""
    return int(_library().emul_allocations_of_ours())


def waits() -> int:
    """How often the host has waited for the device so far."""
    return int(_library().emul_waits())


def launches() -> int:
    """How many of the plugin's kernels were launched so far."""
    return int(_library().emul_launches())


class Graph:
    """As torch.cuda.CUDAGraph, of what the plugin enqueues on one stream."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(FOLDER / "_cuda.so"))
        self._made = ctypes.c_void_p()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        with torch.Stream(device()) as stream:
            address = ctypes.c_void_p(stream.native_handle)
            graph = ctypes.c_void_p()
            assert self._library.cudaStreamBeginCapture(address, 0) == 0
            try:
                yield
            finally:
                end = self._library.cudaStreamEndCapture(address, ctypes.byref(graph))
                assert end == 0
            make = self._library.cudaGraphInstantiate
            assert make(ctypes.byref(self._made), graph, ctypes.c_ulonglong(0)) == 0
            assert self._library.cudaGraphDestroy(graph) == 0

    def replay(self) -> None:
        stream = torch.accelerator.current_stream().native_handle
        assert self._library.cudaGraphLaunch(self._made, ctypes.c_void_p(stream)) == 0


def fail_allocation() -> None:
    """The plugin's next allocation finds no memory."""
    _library().emul_fail_malloc()


def fail_pin() -> None:
    """The next memory of the host cannot be pinned."""
    _library().emul_fail_pin()


def torchs_stream() -> int:
    """The address of torch's stream."""
    return int(_library().emul_torchs_stream())


def last_stream() -> int | None:
    """The stream of the last launch, copy or memset of CUDA's."""
    found = _library().emul_last_stream()
    return None if found is None else int(found)
