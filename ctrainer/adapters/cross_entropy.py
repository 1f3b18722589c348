"""The cross entropy of a linear layer's outputs, a chunk of rows at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ctrainer import _C

# Of a chunk's logits. With 50,257 classes the CPU takes 167 rows; twice as many were
# 5 % faster at a width of 128, and no faster at 768.
_CHUNK_BYTES = {"cpu": 32 << 20}
_CHUNK_BYTES_GPU = 256 << 20  # not measured
# Of float16 logits, whose gradients, at most 1, are scaled by a power of 2 until those
# of one class are up to so much in all rows of a chunk: more of the small ones stay
# above the smallest float16, 6e-8, and the weight's gradient is far below the largest,
# 65,504.
_HALF_SUM = 1024
# Rows of logits begin at multiples of so many: matrix products are faster for that.
_ALIGN = 16


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Return cross_entropy(linear(hidden, weight, bias), labels) without holding all
    logits: they are computed for chunks of rows, and so are the gradients, in the
    forward pass. Rows that are ignored are not computed at all.

    On a GPU the host waits for the labels, to count these rows.

    Under autocast the products are in its dtype, as linear's. The gradient of a weight
    in bfloat16 or float16 is added over the chunks in float32. A second backward pass
    of a retained graph computes everything again.

    Args:
        hidden (Tensor): (..., H), of a float dtype.
        weight (Tensor): (V, H), of hidden's dtype; under autocast of any float dtype.
        labels (Tensor): int64 (...), in [0, V) or ignore_index. On a GPU a label that
            is neither makes the loss and the gradient NaN.
        bias (Tensor | None, default None): (V,).
        ignore_index (int, default -100): Label of rows that do not count.
        label_smoothing (float, default 0.0): In [0, 1]: the loss of a row is
            (1 - label_smoothing) * -log p(label) + label_smoothing * the mean over
            classes of -log p.
        reduction (str, default "mean"): "mean" over the rows that count, NaN without
            any, or "sum", in nats.
        chunk_rows (int | None, default None): Rows of a chunk; None: as many as make
            32 MiB of logits on the CPU and 256 MiB on a GPU.

    Returns:
        Tensor: The loss, a scalar: float32, or float64 where hidden is float64.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; a label that is no class,
            with its row and value, where labels are in the host's memory.
        RuntimeError: in backward(create_graph=True).

    Source:
        Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7.

    Example:
        >>> import torch
        >>> from ctrainer import linear_cross_entropy
        >>> hidden = torch.zeros(2, 3, requires_grad=True)
        >>> labels = torch.tensor([0, -100])
        >>> loss = linear_cross_entropy(hidden, torch.zeros(4, 3), labels)
        >>> round(loss.item(), 4)
        1.3863
    """
    dtype, amp = product_dtype(hidden)
    _check(hidden, weight, labels, bias, dtype, amp)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    return chunked_loss(
        hidden, weight, bias, labels, dtype,
        ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction, chunk_rows=chunk_rows,
    )  # fmt: skip


def product_dtype(hidden: torch.Tensor) -> tuple[torch.dtype, bool]:
    """The dtype of a linear layer of the tensor, and whether it is autocast's, which
    leaves float64 as it is."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind), True
    return hidden.dtype, False


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    amp: bool,
) -> None:
    shapes = [tuple(t.shape) for t in (hidden, weight, labels)]
    if (
        weight.ndim != 2
        or hidden.ndim < 1
        or hidden.shape[-1] != weight.shape[1]
        or labels.shape != hidden.shape[:-1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        found = None if bias is None else tuple(bias.shape)
        raise ValueError(
            "expected hidden (..., H), weight (V, H), labels (...) and bias (V,) or "
            f"None; got hidden {shapes[0]}, weight {shapes[1]}, labels {shapes[2]} and "
            f"bias {found}"
        )
    others = [weight] if bias is None else [weight, bias]
    if not dtype.is_floating_point or labels.dtype != torch.int64:
        raise ValueError(
            "expected hidden of a float dtype and labels of int64; got "
            f"{hidden.dtype} and {labels.dtype}"
        )
    if not amp and any(t.dtype != dtype for t in others):
        raise ValueError(
            f"hidden is {dtype}, weight and bias {[t.dtype for t in others]}; they "
            "must have one dtype outside of autocast"
        )


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    dtype: torch.dtype,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """linear_cross_entropy() of operands that fit, with products in `dtype`."""
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counts = labels.ne(ignore_index)
    if labels.device.type == "cpu":
        _check_labels(labels, counts, weight.shape[0])
    kept = counts.nonzero().squeeze(1)
    if len(kept) < len(labels):
        hidden, labels = hidden.index_select(0, kept), labels.index_select(0, kept)
    if chunk_rows is None:
        room = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES_GPU)
        chunk_rows = max(room // (weight.shape[0] * dtype.itemsize), _ALIGN)
    rows = max(min(len(labels), chunk_rows), 1)
    half = dtype == torch.float16
    plan = _Plan(
        dtype, rows, float(label_smoothing), torch.is_grad_enabled(),
        len(labels) if reduction == "mean" else 1,
        2.0 ** (_HALF_SUM.bit_length() - rows.bit_length()) if half else 1.0,
    )  # fmt: skip
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, plan)  # type: ignore[no-untyped-call]
    return loss


def _check_labels(labels: torch.Tensor, counts: torch.Tensor, classes: int) -> None:
    bad = counts & ((labels < 0) | (labels >= classes))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"the label of row {row} is {int(labels[row])}; expected a class in "
            f"[0, {classes}) or the ignore_index"
        )


class _Plan(NamedTuple):
    dtype: torch.dtype  # of the products
    chunk_rows: int
    label_smoothing: float
    grad: bool  # whether autograd records
    divisor: int  # of the sum; 0 for a mean of nothing
    scale: float  # of the gradients until backward


class _Grads(NamedTuple):
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        plan: _Plan,
    ) -> torch.Tensor:
        wanted = tuple(plan.grad and need for need in ctx.needs_input_grad[:3])
        losses, ctx.grads = _run(hidden, weight, bias, labels, plan, wanted)
        ctx.plan, ctx.wanted = plan, wanted
        ctx.save_for_backward(hidden, weight, bias, labels)
        loss = losses.sum() / plan.divisor
        return loss if hidden.dtype == torch.float64 else loss.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reject_create_graph()
        operands, grads = ctx.saved_tensors, ctx.grads
        ctx.grads = None  # they become the gradients of the parameters themselves
        if grads is None:
            hidden, weight, bias, labels = operands
            _, grads = _run(hidden, weight, bias, labels, ctx.plan, ctx.wanted)
        factor = grad / (max(ctx.plan.divisor, 1) * ctx.plan.scale)
        found = [
            None if g is None else g.mul_(factor).to(of.dtype)
            for g, of in zip(grads, operands, strict=False)
        ]
        return (*found, None, None)


def reject_create_graph() -> None:
    """Raise RuntimeError where the backward pass under way is to have a graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the gradient of a chunked cross entropy has no derivative, which "
            "create_graph=True asks for; compute F.cross_entropy of all logits, "
            "without chunked_cross_entropy"
        )


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    plan: _Plan,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor, _Grads]:
    """The losses, and the wanted gradients times plan.scale."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return _chunks(
            hidden.to(plan.dtype), weight.to(plan.dtype),
            None if bias is None else bias.to(plan.dtype), labels, plan, wanted,
        )  # fmt: skip


def _chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    plan: _Plan,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor, _Grads]:
    n, classes = len(labels), weight.shape[0]
    rows = plan.chunk_rows
    columns = -(-classes // _ALIGN) * _ALIGN
    buffer = hidden.new_empty(rows, columns)
    # oneDNN's products on AMX read beyond a row, and zero times NaN would be NaN.
    buffer[:, classes:] = 0.0
    losses = torch.empty(n, dtype=torch.float64, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = _Sum(weight) if wanted[1] else None
    of_bias = weight.new_zeros(classes, dtype=_wide(plan.dtype)) if wanted[2] else None
    for at in range(0, n, rows):
        x = hidden[at : at + rows]
        logits = buffer[: len(x), :classes]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        _C.cross_entropy(
            buffer[: len(x)], labels[at : at + rows], losses[at : at + rows],
            classes=classes, label_smoothing=plan.label_smoothing,
            scale=plan.scale, gradient=any(wanted),
        )  # fmt: skip
        if of_hidden is not None:
            torch.mm(logits, weight, out=of_hidden[at : at + rows])
        if of_weight is not None:
            of_weight.add(logits.t(), x)
        if of_bias is not None:
            of_bias += logits.sum(0, dtype=of_bias.dtype)
    total = None if of_weight is None else of_weight.total()
    return losses, _Grads(of_hidden, total, of_bias)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Sum:
    """The sum of products, at least in float32."""

    _total: torch.Tensor | None = None

    def __init__(self, like: torch.Tensor) -> None:
        self._like, self._dtype = like, _wide(like.dtype)
        narrow = like.dtype != self._dtype
        self._product = torch.empty_like(like) if narrow else None

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if self._total is None:
            self._total = torch.mm(a, b, out=self._product).to(self._dtype)
        elif self._product is None:
            self._total.addmm_(a, b)
        else:
            self._total += torch.mm(a, b, out=self._product)

    def total(self) -> torch.Tensor:
        if self._total is None:
            return torch.zeros_like(self._like, dtype=self._dtype)
        return self._total
