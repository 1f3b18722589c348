"""Logits that are computed when something reads them: a cross entropy of them is
computed in chunks instead."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ctrainer.adapters.cross_entropy import (
    chunked_loss,
    product_dtype,
    reject_create_graph,
)

_Tensor = torch.Tensor


class Deferral:
    """While it lasts, the output embeddings of a model in training mode return
    DeferredLogits. A cross entropy of them is counted in `losses`.

    Raises:
        ValueError: the model has no output embeddings, or other ones than nn.Linear.
    """

    losses = 0

    def __init__(self, model: nn.Module) -> None:
        get: Any = getattr(model, "get_output_embeddings", None)
        head = get() if callable(get) else None
        self._model, self.name = model, type(model).__name__
        # The wrappers of PEFT have their copies within, and return what the one in use
        # returns.
        self._heads: list[nn.Linear] = [
            m
            for m in (head.modules() if isinstance(head, nn.Module) else ())
            if isinstance(m, nn.Linear)
            and type(m).forward is nn.Linear.forward
            and "forward" not in vars(m)
        ]
        if not self._heads:
            found = "none" if head is None else type(head).__name__
            raise ValueError(
                "chunked_cross_entropy needs the model's output embeddings, an "
                f"nn.Linear from get_output_embeddings(); {self.name} has {found}: set "
                "chunked_cross_entropy=False"
            )
        for linear in self._heads:
            linear.forward = MethodType(self._forward, linear)  # type: ignore[method-assign]

    def _forward(self, linear: nn.Linear, hidden: _Tensor) -> _Tensor:
        if self._model.training and torch.is_grad_enabled():
            return _defer(_Linear.of(hidden, linear.weight, linear.bias, self))
        return nn.Linear.forward(linear, hidden)

    def check(self) -> None:
        """Raise ValueError when no loss has been computed in chunks."""
        if not self.losses:
            raise ValueError(
                f"chunked_cross_entropy has no effect: {self.name} computes with its "
                "logits before its loss (a soft cap, a scale, an adapter of the output "
                "embeddings), or its loss is no cross entropy of all of them (a "
                "weight, a reduction that is neither mean nor sum, a fused kernel). "
                "Set chunked_cross_entropy=False, or override compute_loss and call "
                "ctrainer.linear_cross_entropy with the hidden states"
            )

    def end(self) -> None:
        for linear in self._heads:
            del linear.forward


class _Linear(NamedTuple):
    """A linear layer that has not been computed, and the rows it is to be of."""

    hidden: _Tensor
    weight: _Tensor
    bias: _Tensor | None
    autocast: bool
    product: torch.dtype  # of the matrix product
    dtype: torch.dtype  # of the logits
    versions: tuple[int, ...]
    deferral: Deferral

    @classmethod
    def of(
        cls, hidden: _Tensor, weight: _Tensor, bias: _Tensor | None, deferral: Deferral
    ) -> _Linear:
        dtype, amp = product_dtype(hidden)
        versions = _versions(hidden, weight, bias)
        return cls(hidden, weight, bias, amp, dtype, dtype, versions, deferral)

    def operands(self) -> tuple[_Tensor, _Tensor, _Tensor | None]:
        """Of the product. Raises RuntimeError when they have changed since."""
        found = self.hidden, self.weight, self.bias
        if _versions(*found) != self.versions:
            raise RuntimeError(
                "the hidden states or the weight of the output embeddings were changed "
                "in place before the logits were read; with chunked_cross_entropy "
                "logits are computed when they are read: change a copy, or set "
                "chunked_cross_entropy=False"
            )
        return found

    def compute(self) -> _Tensor:
        hidden, weight, bias = self.operands()
        dtype = self.product if self.autocast else None
        amp = torch.autocast(hidden.device.type, dtype, self.autocast)
        # Also inside of an autograd function, which turns the recording off.
        with torch.enable_grad(), amp:
            return nn.functional.linear(hidden, weight, bias)


def _versions(*tensors: _Tensor | None) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


class DeferredLogits(torch.Tensor):
    """Shape, dtype, device and graph of logits that are not computed.

    float(), view(), slices of rows and the like return others. A cross entropy is
    computed in chunks, unless the logits, or what they are a view of, have been read;
    anything else reads them: they are computed once, and it gets them instead.
    """

    _linear: _Linear
    _whole: DeferredLogits | None = None  # what these are made from,
    _make: Callable[[_Tensor], _Tensor]  # and how
    _value: _Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _asks_for_shape(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = NotImplemented
        if args and isinstance(args[0], DeferredLogits) and not args[0].was_read():
            if func is nn.functional.cross_entropy:
                found = _cross_entropy(*args, **kwargs)
            elif func in _PASSES:
                found = _passed(func, args, kwargs)
        if found is NotImplemented:
            args, kwargs = tree_map_only(DeferredLogits, _read, (args, kwargs))
            found = func(*args, **kwargs)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Behind autograd, whose graph goes through _Defer.
        values = tree_map_only(
            DeferredLogits, lambda t: _read(t).detach(), (args, kwargs or {})
        )
        return func(*values[0], **values[1])

    def was_read(self) -> bool:
        """Whether somebody has the logits, or those of which these are a view."""
        whole = self._whole
        return self._value is not None or (whole is not None and whole.was_read())


def _read(logits: DeferredLogits) -> _Tensor:
    if logits._value is None:
        whole = logits._whole
        logits._value = (
            logits._linear.compute() if whole is None else logits._make(_read(whole))
        )
    return logits._value


class _Defer(torch.autograd.Function):
    """The node of the graph for what reads logits behind torch's functions, such as
    another autograd function."""

    @staticmethod
    def forward(
        ctx: Any, hidden: _Tensor, weight: _Tensor, _: _Tensor | None, linear: _Linear
    ) -> _Tensor:
        ctx.linear = linear
        made: _Tensor = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], weight.shape[0]),
            dtype=linear.dtype, device=hidden.device,
        )  # fmt: skip
        return made

    @staticmethod
    def backward(ctx: Any, grad: _Tensor) -> Any:
        reject_create_graph()
        linear: _Linear = ctx.linear
        given = linear.operands()
        own = [None if t is None else t.detach() for t in given]
        wanted = []
        for t, need in zip(own, ctx.needs_input_grad, strict=False):
            if t is not None and need:
                wanted.append(t.requires_grad_())
        hidden, weight, bias = own
        assert hidden is not None
        assert weight is not None
        logits = linear._replace(hidden=hidden, weight=weight, bias=bias).compute()
        grads = iter(torch.autograd.grad(logits, wanted, grad.to(logits.dtype)))
        needs = ctx.needs_input_grad[:3]
        return (*[next(grads) if need else None for need in needs], None)


def _defer(linear: _Linear) -> DeferredLogits:
    logits: DeferredLogits = _Defer.apply(  # type: ignore[no-untyped-call]
        linear.hidden, linear.weight, linear.bias, linear
    )
    logits._linear = linear
    return logits


_GETTERS = frozenset(
    "shape dtype device ndim layout requires_grad grad_fn is_leaf is_cuda is_cpu "
    "is_sparse is_quantized is_meta is_nested is_mps is_xpu names itemsize".split()
)
_QUERIES = frozenset(
    "size dim numel nelement ndimension is_floating_point is_complex get_device "
    "element_size".split()
)


def _asks_for_shape(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _GETTERS
    return name in _QUERIES


# What makes logits of logits: another shape, fewer rows or float32.
_PASSES = frozenset(
    {
        torch.Tensor.contiguous, torch.Tensor.view, torch.Tensor.reshape,
        torch.Tensor.flatten, torch.Tensor.float, torch.Tensor.to,
        torch.Tensor.__getitem__,
    }
)  # fmt: skip


def _passed(func: Any, args: Any, kwargs: Any) -> Any:
    """The same function of deferred logits, where each row is still one of theirs."""
    logits, *rest = args
    classes = logits.shape[-1]
    if func is torch.Tensor.__getitem__ and not _takes_rows(rest[0], logits.ndim):
        return NotImplemented
    like = torch.empty(logits.shape, dtype=logits.dtype, device="meta")
    if func is torch.Tensor.to and not (
        set(kwargs) <= {"dtype"} and all(isinstance(a, torch.dtype) for a in rest)
    ):
        return NotImplemented
    made = func(like, *rest, **kwargs)
    if not made.ndim or made.shape[-1] != classes or made.numel() == 0:
        return NotImplemented
    linear = logits._linear
    if made.dtype not in (linear.dtype, torch.float32):
        return NotImplemented
    hidden = linear.operands()[0]
    if func is torch.Tensor.__getitem__:
        hidden = hidden[rest[0]]
    hidden = hidden.reshape(*made.shape[:-1], hidden.shape[-1])
    versions = (hidden._version, *linear.versions[1:])
    found = _defer(linear._replace(hidden=hidden, dtype=made.dtype, versions=versions))
    found._whole = logits
    found._make = lambda value: func(value, *rest, **kwargs)
    return found


def _takes_rows(index: Any, ndim: int) -> bool:
    """Does an index of slices and numbers leave the last dimension as it is?"""
    index = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(i, int | slice) or i is Ellipsis for i in index)
    if not plain or any(isinstance(i, bool) for i in index):
        return False
    if Ellipsis not in index:
        return len(index) < ndim or (len(index) == ndim and index[-1] == slice(None))
    return index[-1] is Ellipsis or index[-1] == slice(None)


def _cross_entropy(
    logits: DeferredLogits,
    target: _Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if (
        logits.ndim != 2
        or target.shape != logits.shape[:1]
        or target.dtype != torch.int64
        or target.device != logits.device
        or not (weight is size_average is reduce is None)
        or reduction not in ("mean", "sum")
    ):
        return NotImplemented
    linear = logits._linear
    loss = chunked_loss(
        *linear.operands(), target, linear.product, ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction=reduction,
    )  # fmt: skip
    linear.deferral.losses += 1
    amp = torch.is_autocast_enabled(logits.device.type)
    return loss if amp else loss.to(logits.dtype)
