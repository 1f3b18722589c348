"""Modules whose passes run out of memory at drawn times and places."""

import random
from typing import Any

import torch


class Fails:
    """`most` failures in passes of at least `least` rows, or what `size` says of a
    tensor: before or after a module, or in its backward pass; in evaluations instead of
    training with `evaluating`."""

    def __init__(
        self, seed: int, most: int, rate: float, least: int = 2,
        evaluating: bool = False, size: Any = len,
    ) -> None:  # fmt: skip
        self.draw, self.left, self.failed = random.Random(seed), most, 0
        self.rate, self.least, self.evaluating = rate, least, evaluating
        self.size, self.places = size, set[str]()

    def check(self, place: str, rows: int) -> None:
        if rows < self.least or not self.left or self.draw.random() > self.rate:
            return
        self.left, self.failed = self.left - 1, self.failed + 1
        self.places.add(place)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def watch(self, module: Any) -> None:
        def counts() -> bool:
            if self.evaluating:
                return not module.training
            return bool(module.training) and torch.is_grad_enabled()

        def before(_: Any, args: Any, kwargs: Any = None) -> None:
            if counts():
                given = (*args, *(kwargs or {}).values())
                first = next(filter(torch.is_tensor, given))
                self.check("forward", self.size(first))

        def after(_: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not counts() or not torch.is_tensor(first):
                return
            rows = self.size(first)
            if first.requires_grad:
                first.register_hook(lambda grad: self.check("backward", rows))
            if first.requires_grad or self.evaluating:
                self.check("after", rows)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
