"""fairseq's moving average of a model that is sharded: each process has a part."""

from __future__ import annotations

from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq.ema import EMA


class ShardedEMA(EMA):
    """EMA whose averages are shards, of float32 whatever the model computes in.

    average: a copy of the model before it was sharded, sharded in the same way; it is
    the model that get_model() gives, whose state_dict() is whole and whose forward all
    processes call. model: the sharded one.
    """

    def __init__(self, average: Any, model: Any, config: Any) -> None:
        self.config, self.model = config, average
        seed = getattr(config, "ema_seed_model", None)
        if seed:
            average.load_state_dict(tools.load_file(seed)["model"], strict=True)
        self.decay = float(config.ema_decay)
        self._follow(model)

    @property
    def fp32_params(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole averages that are floats. Collective."""
        return tools.floats_of(self.model.state_dict())

    def step(self, new_model: Any, updates: int) -> None:
        """Average this process's shards after update number `updates`, if due."""
        super().step(self._source, updates)

    def restore(
        self, state_dict: dict[str, Any], build_fp32_params: bool = False
    ) -> None:
        """Take this process's part out of whole averages."""
        self.model.load_state_dict(state_dict, strict=False)

    def reverse(self, model: Any) -> Any:
        raise ValueError(
            "the averages are sharded, and no process has a whole model for them: load "
            "get_model().state_dict(), which all processes call"
        )

    def _follow(self, model: Any) -> None:
        self._source = model
        self._averages, self._weights = _Shards(self.model), _Shards(model)
        names, values = tools.averaged_tensors(self._weights)
        self._begin(values, tools.tensors_named(self._averages, names))

    def _copy_others(self, new_model: Any) -> None:
        tools.copy_others(self._averages, self._weights, {})


class _Shards:
    """A process's own part of a sharded module, as the state of a module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = self._module.local_state_dict(keep_vars=keep_vars)
        return state
