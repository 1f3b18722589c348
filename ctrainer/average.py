"""Averages of a model's weights over its training: exponential ones, and equal ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ctrainer import _C, adapters

__all__ = ["EMA", "SWA", "WeightAverage"]


class WeightAverage:
    """The base of EMA and SWA: averages of the tensors of a model, by name.

    A frozen parameter is no part of it; buffers are, and those that are no floats, such
    as counters, are copied. The memory is that of the model once more. `averages` are
    tensors by the names of state_dict(), of the shapes of the model's; `core` is what a
    Trainer drives, and counts num_updates and n_averaged.

    Args:
        model: Whose weights are averaged; of torch or of ctrainer.adapters.numpy.
        options (dict[str, Any]): Keywords of ctrainer._C.WeightAverage.
        fp32 (bool): Keep float32 averages of fp16 or bf16 weights.

    Example:
        >>> import torch
        >>> from ctrainer import EMA
        >>> sorted(EMA(torch.nn.Linear(3, 2)).averages)
        ['bias', 'weight']
    """

    def __init__(self, model: Any, options: dict[str, Any], fp32: bool) -> None:
        self._adapter = adapters.for_model(model).__name__
        self._tools = adapters.for_model(model).averages
        self._options = options
        self._values: dict[str, Any] = self._tools.tensors(model)
        self.averages: dict[str, Any] = {
            name: self._tools.copy_of(value, fp32)
            for name, value in self._values.items()
        }
        self.core = self._make_core()

    def _make_core(self) -> _C.WeightAverage:
        pairs = [
            pair
            for name, value in self._values.items()
            for pair in self._tools.pieces(value, self.averages[name])
        ]
        values, averages = [v for v, _ in pairs], [average for _, average in pairs]
        return _C.WeightAverage(values, averages, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        counts = {"updates": self.core.num_updates, "averaged": self.core.n_averaged}
        made_anew = ("core", "_tools")
        own = {n: value for n, value in vars(self).items() if n not in made_anew}
        return {"own": own, "counts": counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Averages of the copied model's tensors, where it is copied along."""
        self.__dict__.update(state["own"])
        self._tools = adapters.by_name(self._adapter).averages
        self.core = self._make_core()
        self.core.num_updates = state["counts"]["updates"]
        self.core.n_averaged = state["counts"]["averaged"]

    def update(self) -> bool:
        """Count an update of the optimizer; average if that is due, and return whether
        it was.

        A Trainer that has this average does so itself, in the optimizer's pass.
        """
        return self.core.update()

    def copy_to(self, model: Any) -> None:
        """Write the averages into a model with tensors of the same names.

        Args:
            model: Of torch or of ctrainer.adapters.numpy.

        Raises:
            ValueError: the model lacks a tensor.
        """
        targets = self._tools.tensors(model)
        missing = self.averages.keys() - targets.keys()
        if missing:
            raise ValueError(f"the model has no {sorted(missing)[0]!r}")
        for name, average in self.averages.items():
            self._tools.copy_into(targets[name], average)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model's weights be the averages within the block.

        Tensors of the model's own dtype are exchanged with it, one at a time; of others
        a copy of the model's is kept. Do not train inside.

        Yields:
            None.
        """
        kept: dict[str, Any] = {}
        for name, value in self._values.items():
            if value.dtype == self.averages[name].dtype:
                self._tools.exchange(value, self.averages[name])
            else:
                kept[name] = self._tools.copy_of(value, False)
                self._tools.copy_into(value, self.averages[name])
        try:
            yield
        finally:
            for name, value in self._values.items():
                if name in kept:
                    self._tools.copy_into(value, kept[name])
                else:
                    self._tools.exchange(value, self.averages[name])

    def state_dict(self) -> dict[str, Any]:
        """Return counts and averages; the tensors are not copied."""
        return {
            "num_updates": self.core.num_updates,
            "n_averaged": self.core.n_averaged,
            "averages": dict(self.averages),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() returned.

        Args:
            state_dict (dict[str, Any]): "averages", "num_updates" and "n_averaged".

        Raises:
            ValueError: names or shapes differ; nothing has changed.
        """
        saved = state_dict["averages"]
        differing = saved.keys() ^ self.averages.keys()
        if differing:
            name = sorted(differing)[0]
            place = "the state alone" if name in saved else "this average alone"
            raise ValueError(f"{name!r} is in {place}: it is of another model")
        for name, average in self.averages.items():
            if tuple(saved[name].shape) != tuple(average.shape):
                raise ValueError(
                    f"{name!r} has shape {tuple(saved[name].shape)} in the state; "
                    f"expected {tuple(average.shape)}"
                )
        for name, average in self.averages.items():
            self._tools.copy_into(average, saved[name])
        self.core.num_updates = int(state_dict["num_updates"])
        self.core.n_averaged = int(state_dict["n_averaged"])


class EMA(WeightAverage):
    """An exponential moving average: average * decay + weights * (1 - decay).

    Args:
        model: Whose weights are averaged; of torch or of ctrainer.adapters.numpy.
        decay (float, default 0.999): In [0, 1].
        start_update (int, default 0): Before this update the average is a copy of the
            weights.
        update_freq (int, default 1): One update in this many is averaged.
        fp32 (bool, default False): Keep float32 averages of fp16 or bf16 weights, in
            which small steps are not lost.
        seed_model (default None): A model of the same tensors, where the average
            starts; None: `model`.

    Raises:
        ValueError: a number out of range, or a seed_model with other tensors.

    Source: fairseq's EMA (ema_decay, ema_start_update, ema_update_freq, ema_fp32,
    ema_seed_model), and its order of operations.

    Example:
        >>> import torch
        >>> from ctrainer import EMA
        >>> layer = torch.nn.Linear(3, 2)
        >>> ema = EMA(layer, decay=0.99)
        >>> ema.update()  # after each update of the weights
        True
        >>> with ema.applied():
        ...     out = layer(torch.ones(1, 3))
    """

    def __init__(
        self,
        model: Any,
        decay: float = 0.999,
        *,
        start_update: int = 0,
        update_freq: int = 1,
        fp32: bool = False,
        seed_model: Any = None,
    ) -> None:
        options = {"decay": decay, "start": start_update, "every": update_freq}
        super().__init__(model, {"kind": "ema", **options}, fp32)
        if seed_model is not None:
            seed = self._tools.tensors(seed_model)
            if seed.keys() != self.averages.keys():
                name = sorted(seed.keys() ^ self.averages.keys())[0]
                raise ValueError(
                    f"seed_model and model differ: {name!r} is in one only"
                )
            for name, average in self.averages.items():
                self._tools.copy_into(average, seed[name])


class SWA(WeightAverage):
    """An equal average of the weights after some updates.

    Args:
        model: Whose weights are averaged; of torch or of ctrainer.adapters.numpy.
        start_update (int, default 0): The first update that is averaged.
        update_freq (int, default 1): After it, one update in this many.
        fp32 (bool, default False): Keep float32 averages of fp16 or bf16 weights.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization", 2018.

    Example:
        >>> import torch
        >>> from ctrainer import SWA
        >>> average = SWA(torch.nn.Linear(3, 2), start_update=1)
        >>> average.update(), average.state_dict()["n_averaged"]
        (True, 1)
    """

    def __init__(
        self, model: Any, *, start_update: int = 0, update_freq: int = 1,
        fp32: bool = False,
    ) -> None:  # fmt: skip
        options = {"start": start_update, "every": update_freq}
        super().__init__(model, {"kind": "swa", **options}, fp32)


def from_arguments(args: Any, model: Any) -> WeightAverage | None:
    """The average that training arguments ask for, if they do."""
    swa_start = getattr(args, "swa_start_update", None)
    if swa_start is not None and getattr(args, "ema_decay", None) is not None:
        raise ValueError(
            "ema_decay and swa_start_update are both set; a run keeps one average: "
            "leave one of them None"
        )
    if getattr(args, "ema_decay", None) is not None:
        return EMA(
            model,
            args.ema_decay,
            start_update=args.ema_start_update,
            update_freq=args.ema_update_freq,
            fp32=args.ema_fp32,
        )
    if swa_start is not None:
        return SWA(
            model,
            start_update=swa_start,
            update_freq=args.swa_update_freq,
            fp32=args.ema_fp32,
        )
    return None
