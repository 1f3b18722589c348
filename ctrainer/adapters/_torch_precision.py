"""torch: autocast of a model, its weights in another dtype, float16 parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Args = Any
Model = nn.Module


class _Autocast:
    """A model's forward under autocast, its floating-point outputs in fp32."""

    def __init__(self, forward: Callable[..., Any], device: str, dtype: torch.dtype):
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.context = functools.partial(torch.autocast, device, dtype=dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            outputs = self.forward(*args, **kwargs)
        return map_tensors(outputs, _to_fp32)


def map_tensors(data: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`data` with its tensors changed: a tensor, or a nest of mappings, lists and
    tuples, of which new ones of the same types are made."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return type(data)({k: map_tensors(v, change) for k, v in data.items()})  # type: ignore[call-arg]
    if not isinstance(data, tuple | list):
        return data
    items = [map_tensors(v, change) for v in data]
    return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


def enter_mixed_precision(model: Model, args: Args) -> bool:
    """Run the model's forward in bf16 or fp16 as `args` ask; False where they do not,
    or it does already. Source: accelerate, which wraps forward in the same way."""
    if not (args.bf16 or args.fp16) or isinstance(
        model.__dict__.get("forward"), _Autocast
    ):
        return False
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    model.forward = _Autocast(model.forward, torch.device(args.device).type, dtype)
    return True


def leave_mixed_precision(model: Model) -> None:
    """Restore the model's own forward."""
    wrapped = model.__dict__.get("forward")
    if isinstance(wrapped, _Autocast):
        del model.forward
        if model.forward != wrapped.forward:
            model.forward = wrapped.forward


def lossy_fp16_parameter(model: Model, optimizer: Any) -> str | None:
    """Name of a float16 parameter that is updated without a float32 copy, or None."""
    copied = {
        id(p)
        for group in getattr(optimizer, "param_groups", ())
        if group.get("master_weights")
        for p in group["params"]
    }
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype == torch.float16 and id(p) not in copied:
            return str(name)
    return None


def cast_model(model: Model, dtype: str, device: Any) -> Callable[[], None]:
    """Turn the model's floating-point weights and buffers into `dtype` on `device`;
    return a function that restores its own, bit for bit, which it holds meanwhile."""
    own = [(t, t.data) for t in (*model.parameters(), *model.buffers())]

    def uncast() -> None:
        for tensor, data in own:
            tensor.data = data

    try:
        for tensor, data in own:
            wanted = getattr(torch, dtype) if data.is_floating_point() else data.dtype
            tensor.data = data.to(device=device, dtype=wanted)
    except BaseException:
        uncast()
        raise
    return uncast
