"""What a NumPy model is made of: parameters and a loss that knows its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Parameter:
    """An array that is trained, and its gradient.

    The engine writes to data in place; grad is None or an array like it.

    Args:
        data (Array): Of float32, float64 or float16; copied where it is not contiguous.
        requires_grad (bool, default True): Train it.

    Raises:
        TypeError: another dtype.

    Example:
        >>> import numpy as np
        >>> from ctrainer.adapters.numpy import Parameter
        >>> weight = Parameter(np.zeros((2, 3), np.float32))
        >>> weight.accumulate(np.ones((2, 3)))
        >>> weight.grad.sum()
        np.float32(6.0)
    """

    __slots__ = ("__weakref__", "data", "grad", "requires_grad")

    def __init__(self, data: Array, requires_grad: bool = True) -> None:
        self.data = np.ascontiguousarray(data)
        if self.data.dtype.kind != "f":
            raise TypeError(
                f"a parameter of dtype {self.data.dtype} cannot be trained; expected "
                "float32, float64 or float16"
            )
        self.grad: Array | None = None
        self.requires_grad = requires_grad

    def accumulate(self, grad: Array) -> None:
        """Add to the gradient, which becomes an array of this parameter's dtype.

        Args:
            grad (Array): Of this parameter's shape.
        """
        if self.grad is None:
            self.grad = np.array(grad, dtype=self.data.dtype, order="C")
        else:
            self.grad += grad

    def __repr__(self) -> str:
        return f"Parameter({self.data!r})"


class Loss(float):
    """The value of a loss, with the function that brings gradients to parameters.

    Args:
        value (float): The loss.
        pull (Callable[[float], None]): pull(scale) adds scale times the gradient of the
            loss to each parameter.
        scale (float, default 1.0): Factor of the value that the gradients get, too;
            products of a Loss have it.

    Example:
        >>> from ctrainer.adapters.numpy import Loss
        >>> (Loss(2.0, lambda scale: print("scale", scale)) / 4).backward()
        scale 0.25
    """

    pull: Callable[[float], None]
    scale: float

    def __new__(
        cls, value: float, pull: Callable[[float], None], scale: float = 1.0
    ) -> Loss:
        loss = super().__new__(cls, value)
        loss.pull = pull
        loss.scale = scale
        return loss

    def backward(self) -> None:
        """Add the gradients to the parameters."""
        self.pull(self.scale)

    def detach(self) -> np.float64:
        """Return the value alone, as a NumPy number."""
        return np.float64(self)

    def __mul__(self, factor: float) -> Loss:
        return Loss(float(self) * factor, self.pull, self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Loss:
        return Loss(float(self) / divisor, self.pull, self.scale / divisor)


class ItemCount:
    """Number of predicted targets in an update; notes whether anybody used it.

    Args:
        value (int): The number.

    Example:
        >>> from ctrainer.adapters.numpy import ItemCount
        >>> count = ItemCount(10)
        >>> int(count), count.was_read
        (10, True)
    """

    __array_ufunc__ = None  # NumPy leaves arithmetic with it to the methods below

    def __init__(self, value: int) -> None:
        self.value = value
        self.was_read = False

    def _read(self) -> int:
        self.was_read = True
        return self.value

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._read()

    def __truediv__(self, other: Any) -> Any:
        return self._read() / other

    def __mul__(self, other: Any) -> Any:
        return self._read() * other

    __rmul__ = __mul__

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return self._read()

    __index__ = __int__
