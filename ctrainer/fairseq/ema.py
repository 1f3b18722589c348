"""fairseq's exponential moving average of a model's weights, averaged in C.

Source: fairseq, models/ema/ema.py.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from ctrainer import _C
from ctrainer.adapters import fairseq_parameters
from ctrainer.adapters import torch_fairseq as tools

__all__ = ["EMA"]

logger = logging.getLogger(__name__)


class EMA:
    """average = average * decay + weights * (1 - decay), of the whole state_dict().

    Entries that are no floats, and those with "version" in their names, are copied.

    Args:
        model: Whose weights are averaged.
        config: ema_decay; ema_start_update, before which the average is a copy;
            ema_update_freq: one update in that many is averaged; ema_fp32: the averages
            are kept in float32, in fp32_params; ema_seed_model: a checkpoint to begin
            with.
        device (default None): Where the averages are; None: where the model is.

    Example:
        >>> import torch
        >>> from argparse import Namespace
        >>> from ctrainer.fairseq.ema import EMA
        >>> layer = torch.nn.Linear(3, 2)
        >>> ema = EMA(layer, Namespace(ema_decay=0.9))
        >>> ema.step(layer, updates=1)
        >>> ema.get_decay()
        0.9
    """

    def __init__(self, model: Any, config: Any, device: Any = None) -> None:
        self.config = config
        self.model = copy.deepcopy(model).requires_grad_(False)
        if device is not None:
            self.model.to(device)
        seed = getattr(config, "ema_seed_model", None)
        if seed:
            self.model.load_state_dict(tools.load_file(seed)["model"], strict=True)
        self.decay = float(config.ema_decay)
        self.fp32_params: dict[str, Any] = {}
        self._follow(model)

    def _follow(self, model: Any) -> None:
        """Average the tensors of `model` from now on."""
        self._source = model
        names, values = tools.averaged_tensors(model)
        averages = tools.tensors_named(self.model, names)
        if getattr(self.config, "ema_fp32", False):
            if not self.fp32_params:
                self.build_fp32_params()
            averages = [self.fp32_params[name] for name in names]
        self._begin(values, averages)

    def _begin(self, values: list[Any], averages: list[Any]) -> None:
        self._core = _C.WeightAverage(
            values,
            averages,
            kind="ema",
            decay=float(self.config.ema_decay),
            start=getattr(self.config, "ema_start_update", 0),
            every=getattr(self.config, "ema_update_freq", 1),
        )

    def build_fp32_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Make the float32 averages of a state, where the model is.

        Args:
            state_dict (dict[str, Any] | None, default None): The state; None: that of
                the model.
        """
        names, own = tools.averaged_tensors(self.model)
        state = self.model.state_dict() if state_dict is None else state_dict
        self.fp32_params = {
            name: tools.float32_copy(state[name], tensor.device)
            for name, tensor in zip(names, own, strict=True)
        }

    def step(self, new_model: Any, updates: int) -> None:
        """Average the weights after an update, if that is due.

        Args:
            new_model: With the weights.
            updates (int): Number of the update, from 1.
        """
        if new_model is not self._source:
            self._follow(new_model)
        start = getattr(self.config, "ema_start_update", 0)
        self.decay = 0.0 if updates < start else float(self.config.ema_decay)
        self._core.num_updates = updates - 1
        self._core.update()
        self._copy_others(new_model)

    def _copy_others(self, new_model: Any) -> None:
        """Let the average have what of the model is not averaged."""
        tools.copy_others(self.model, new_model, self.fp32_params)

    def get_decay(self) -> float:
        """Return the decay of the last step."""
        return self.decay

    def get_model(self) -> Any:
        """Return the model whose weights are the averages."""
        return self.model

    def restore(
        self, state_dict: dict[str, Any], build_fp32_params: bool = False
    ) -> None:
        """Take over averages from a model's state.

        Args:
            state_dict (dict[str, Any]): The state.
            build_fp32_params (bool, default False): Make the float32 averages of it,
                too.

        Raises:
            ValueError: some of the averages are not in it, or others are.
        """
        result = self.model.load_state_dict(state_dict, strict=False)
        averaged, _ = tools.averaged_tensors(self.model)
        missing = [name for name in result.missing_keys if name in averaged]
        if missing or result.unexpected_keys:
            raise ValueError(
                "the averages of a checkpoint do not fit the model: missing "
                f"{', '.join(missing) or 'none'}; unexpected "
                f"{', '.join(result.unexpected_keys) or 'none'}"
            )
        if build_fp32_params:
            saved = fairseq_parameters.upgraded_weights(self.model, state_dict)
            self.build_fp32_params({**self.model.state_dict(), **saved})
            self._follow(self._source)

    def reverse(self, model: Any) -> Any:
        """Write the averages into a model, and return it.

        Args:
            model: The model.
        """
        model.load_state_dict(self.model.state_dict(), strict=False)
        return model
